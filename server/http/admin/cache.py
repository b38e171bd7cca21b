"""``POST /flush_cache``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....messages.control import FlushCacheReq
from ..answers import AnswerBody, InstanceAnswer, respond
from ..endpoint import endpoint
from ..engine.question_client import QuestionRefused
from ..errors import ApiError
from ..state import HttpState

QUESTION_TIMEOUT_SECONDS = 5.0


class Flushed(AnswerBody):
    """``POST /flush_cache``; a router also says what each instance answered."""

    success: Literal[True]
    flushed: int
    instances: list[InstanceAnswer] = Field(default=[])


@endpoint(Flushed)
async def flush_cache(request: Request) -> Response:
    """Drop every cached prefix, also in host memory and the store, and answer how many tokens the KV pool dropped.

    Answers 400 while any request is running or queued.
    """
    engine = HttpState.of(request).engine
    try:
        result = await engine.questions.ask(FlushCacheReq(), QUESTION_TIMEOUT_SECONDS)
    except QuestionRefused as e:
        raise ApiError(400, e.message) from None
    return respond(Flushed(success=True, flushed=result.flushed))
