"""Endpoints that release and resume memory, for admins, by SGLang's names: ``POST /release_memory_occupation`` and
``/resume_memory_occupation``. Also ``POST /kv/resize``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....messages.memory import ALL_TAGS, MemoryReq, MemoryTag, ResizeReq
from ..answers import AnswerBody, respond
from ..bodies.fields import INT32_MAX, Body
from ..endpoint import endpoint
from ..engine.question_client import NoAnswer
from ..errors import ApiError
from ..parsing import parse_body
from ..state import HttpState

RELEASE_SECONDS = 60.0
"""Timeout beyond ``wait_s``: for peers to disconnect, and for the worker."""
RESIZE_SECONDS = 30.0
"""Timeout beyond ``wait_s``: for the worker, which may be in the middle of a long step."""
LONGEST_WAIT = 3600.0


class ResumeBody(Body):
    """``POST /resume_memory_occupation``: of what; nothing or [] means all that was given back."""

    may_be_left_out: ClassVar[bool] = True
    refuses_unknown: ClassVar[bool] = True
    tags: Annotated[list[MemoryTag], Field(max_length=len(ALL_TAGS))] = Field(default_factory=list)


class ReleaseBody(ResumeBody):
    """``POST /release_memory_occupation``: of what; nothing or [] means all that is held.

    ``wait_s``: seconds for running requests to end, while no others are let in; 0: refuse where there are any.
    """

    wait_s: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] = 0.0


class MemoryReleased(AnswerBody):
    """``POST /release_memory_occupation``: what is not there now, and how much less is used."""

    released: list[Literal["kv_cache", "weights"]]
    freed_bytes: int
    seconds: float


class MemoryResumed(AnswerBody):
    """``POST /resume_memory_occupation``: what is still not there, and how much more is used."""

    released: list[Literal["kv_cache", "weights"]]
    taken_bytes: int
    seconds: float


@endpoint(MemoryReleased, body=ReleaseBody)
async def release_memory(request: Request) -> Response:
    """Give the memory of the KV pool, of the weights or of both back to the system, and answer when that is done.

    Running requests first get ``wait_s`` seconds to end. Answers 409 with the reason if the memory is kept.
    """
    body = await parse_body(request, ReleaseBody)
    return await _change(request, True, body.tags, body.wait_s, body.wait_s + RELEASE_SECONDS)


@endpoint(MemoryResumed, body=ResumeBody)
async def resume_memory(request: Request) -> Response:
    """Allocate released memory again, load the weights anew if they were released, and answer when that is done.

    Answers 503 with the reason if that fails.
    """
    body = await parse_body(request, ResumeBody)
    return await _change(request, False, body.tags, 0.0, HttpState.of(request).options.startup_timeout)


class ResizeBody(Body):
    """``POST /kv/resize``: tokens, rounded down to whole pages. ``wait_s``: seconds for requests and hand-overs that
    have pages at the pool's end to be over; 0: refuse where there are any.
    """

    max_total_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    wait_s: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] = 0.0


class PoolResized(AnswerBody):
    """``POST /kv/resize``: tokens of the pool now, and before; and how much less the worker has."""

    max_total_tokens: int
    before: int
    freed_bytes: int


@endpoint(PoolResized, body=ResizeBody)
async def resize_pool(request: Request) -> Response:
    """Resize the KV pool to ``max_total_tokens``, within the size that it started with, and answer when that is done.

    Answers 409 with the reason if the size stays as it is.
    """
    body, engine = await parse_body(request, ResizeBody), HttpState.of(request).engine
    question = ResizeReq(body.max_total_tokens, body.wait_s)
    try:
        result = await engine.questions.ask(question, body.wait_s + RESIZE_SECONDS)
    except NoAnswer:
        raise ApiError(503, "the scheduler did not answer; /server_info shows what the pool is") from None
    return respond(
        PoolResized(max_total_tokens=result.max_total_tokens, before=result.before, freed_bytes=result.freed)
    )


async def _change(request: Request, release: bool, tags: list[MemoryTag], wait_s: float, seconds: float) -> Response:
    engine = HttpState.of(request).engine
    try:
        result = await engine.questions.ask(MemoryReq(release, tags, wait_s), seconds)
    except NoAnswer:
        raise ApiError(503, f"it was not over within {seconds:g} s, and goes on; /server_info shows it") from None
    seconds = round(result.seconds, 3)
    if release:
        return respond(MemoryReleased(released=result.released, freed_bytes=result.nbytes, seconds=seconds))
    return respond(MemoryResumed(released=result.released, taken_bytes=result.nbytes, seconds=seconds))
