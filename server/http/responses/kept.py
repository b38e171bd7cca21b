"""``/v1/responses/{id}``: responses that this server keeps."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ..answers import AnswerBody
from ..endpoint import QueryParameter, endpoint
from ..state import HttpState
from .answers import ResponseAnswer


class DeletedResponse(AnswerBody):
    """``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@endpoint(ResponseAnswer, query=[QueryParameter("stream", ("false",))])
async def get_response(request: Request) -> Response:
    """Answer with a response that is kept, or with one that is running as it is by now."""
    return await HttpState.of(request).responses.get(request)


@endpoint(DeletedResponse)
async def delete_response(request: Request) -> Response:
    """Drop a response that is kept."""
    return await HttpState.of(request).responses.delete(request)


@endpoint(ResponseAnswer)
async def cancel_response(request: Request) -> Response:
    """End a running response, which is kept as it is by then."""
    return await HttpState.of(request).responses.cancel(request)
