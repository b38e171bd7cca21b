"""Orders that change what an instance does and where its requests run.

``POST /migrate``, ``/drain`` and ``/role`` are for admins, ``POST /moved`` for other instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....messages.control import RoleReq
from ....messages.moves import MigrateReq, MigrateResult
from ....messages.outputs import ReqText
from ....messages.sampling import SamplingParams
from ....runtime.cluster_secret import addresses
from ....runtime.web.keys import Caller
from ....runtime.web.sse import DATA_PREFIX, EVENT_END
from ..answers import AnswerBody, respond
from ..bodies.fields import Body, Rid
from ..endpoint import endpoint
from ..engine.plan import Prompt, PromptPlan
from ..engine.question_client import NoAnswer, QuestionRefused
from ..engine.submission import Choice, Delta
from ..errors import ApiError, bad_request
from ..generation.engine_response import EngineResponse
from ..generation.tickets import ticket_of
from ..parsing import parse_body
from ..state import HttpState

ROLE_SECONDS = 5.0
MOVE_SECONDS = 120.0
"""Timeout of a migration. While a request waits for memory at the target, it runs on here."""


class MigrateBody(Body):
    """``POST /migrate``: which request, and the bootstrap address of the instance that shall go on with it."""

    rid: Rid
    bootstrap_host: Annotated[str, Field(min_length=1, max_length=253)]
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)]


class Migrated(AnswerBody):
    """``POST /migrate``: how many answers go on there, and for how long each stood still."""

    moved: int
    paused_ms: list[float]


@endpoint(Migrated, body=MigrateBody)
async def migrate(request: Request) -> Response:
    """Move a running request to another instance, which continues its answer; answers when it has moved.

    Answers 404 if the request does not run here, and 409 with the reason if any of its answers stays here.
    """
    state, body = HttpState.of(request), await parse_body(request, MigrateBody)
    if refusal := state.gate.move_refusal([(body.bootstrap_host, body.bootstrap_port)]):
        raise ApiError(403, f"bootstrap_host: {refusal}", param="bootstrap_host")
    rids = state.engine.live.running(body.rid, Caller.of(request.scope))
    if not rids:
        raise ApiError(404, f'rid: no request "{body.rid}" is running here', param="rid")

    async def ask(rid: str) -> MigrateResult | QuestionRefused:
        try:
            question = MigrateReq(rid, body.bootstrap_host, body.bootstrap_port)
            return await state.engine.questions.ask(question, MOVE_SECONDS)
        except QuestionRefused as e:
            return e

    try:
        results = await asyncio.gather(*map(ask, rids))
    except NoAnswer:
        raise ApiError(503, f"it was not moved within {MOVE_SECONDS:g} s, and may yet be") from None
    moved = [result for result in results if isinstance(result, MigrateResult)]
    stays = [result for result in results if isinstance(result, QuestionRefused)]
    if stays:
        raise ApiError(409, f"{len(stays)} of {len(results)} answers stay here: {stays[0].message}")
    return respond(Migrated(moved=len(moved), paused_ms=[round(result.paused_ms, 3) for result in moved]))


class DrainBody(Body):
    """``POST /drain``: the instances that take over the running requests, as HOST:PORT of their bootstrap servers.

    Without any, the requests end here.
    """

    may_be_left_out: ClassVar[bool] = True
    refuses_unknown: ClassVar[bool] = True
    to: list[str] = Field(default_factory=list)


class Draining(AnswerBody):
    """``POST /drain``: how many requests are left."""

    draining: int


@endpoint(Draining, body=DrainBody)
async def drain(request: Request) -> Response:
    """Stop admitting requests, move the running ones to the instances ``to``, and exit when none is left.

    Answers at once. Without ``to``, running requests finish here.
    """
    engine, body = HttpState.of(request).engine, await parse_body(request, DrainBody)
    try:
        to = sorted(addresses("to", ",".join(body.to)))
    except ValueError as e:
        raise bad_request("to", str(e).removeprefix("to ")) from None
    if to and not HttpState.of(request).options.hands_over:
        raise bad_request("to", "this instance exchanges no KV; start it with --handover on, or leave this out")
    if refusal := HttpState.of(request).gate.move_refusal(to):
        raise ApiError(403, f"to: {refusal}", param="to")
    engine.drain(to)
    return respond(Draining(draining=len(engine.live)))


class RoleBody(Body):
    """``POST /role``: what the instance is to be offered from now on."""

    role: Literal["unified", "prefill", "decode"]


class RoleChanged(AnswerBody):
    """``POST /role``."""

    role: str
    before: str


@endpoint(RoleChanged, body=RoleBody)
async def role(request: Request) -> Response:
    """Change the instance's role (unified, prefill or decode) without a restart; cached prefixes stay.

    Running requests go on. Answers 409 if the instance exchanges no KV with others.
    """
    engine, body = HttpState.of(request).engine, await parse_body(request, RoleBody)
    try:
        result = await engine.questions.ask(RoleReq(body.role), ROLE_SECONDS)
    except QuestionRefused as e:
        raise ApiError(409, e.message) from None
    return respond(RoleChanged(role=result.role, before=result.before))


@endpoint()
async def moved(request: Request) -> Response:
    """Stream the rest of a moved answer, which this instance generates, to the instance that has its client.

    A ticket in a header names the answer. Answers 400 without one, 404 if there is no such answer.
    """
    ticket = ticket_of(request.scope)
    if ticket is None:
        raise bad_request(None, "this path is for instances, which send a ticket")
    plan = PromptPlan(Prompt(), SamplingParams(seed=0), 1, ticket.rid, True, None, None, "")
    return EngineResponse(HttpState.of(request).engine, [plan], ItemRenderer(), stream=True)


class ItemRenderer:
    """Writes the engine's output as ``ReqText`` messages, unchanged."""

    field_names: ClassVar[Mapping[str, str]] = {}

    @property
    def created(self) -> int:
        """Return 0: a ``ReqText`` has no creation time. The instance that has the client reports it."""
        return 0

    @property
    def repeats(self) -> bool:
        """Return False: each event holds only what is new."""
        return False

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Raise ``AssertionError``: a moved answer is always read as a stream."""
        raise AssertionError("a moved answer is read as a stream")

    def events(self, delta: Delta) -> bytes:
        """Encode what is new of a choice as one server-sent event: a ``ReqText`` in JSON, without the request's id."""
        choice = delta.choice
        prompt, logprobs = choice.prompt if delta.is_first else None, delta.logprobs or None
        item = ReqText("", delta.text, delta.token_ids, delta.finish, choice.meta, logprobs, prompt, choice.reasoning)
        return DATA_PREFIX + msgspec.json.encode(item) + EVENT_END

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return no bytes: no event follows the last choice's end."""
        return b""
