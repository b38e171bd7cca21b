"""``GET /version``, ``/server_info``, ``/transfers``, ``/model_info`` and ``/props``: what runs here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import Response

from ....messages.control import ServerInfoReq, TransfersReq
from ....runtime.web.json_response import json_response
from ....runtime.web.keys import Caller
from ..answers import AnswerBody, respond
from ..endpoint import endpoint
from ..engine.question_client import QuestionRefused
from ..state import HttpState

FOR_USERS = frozenset(
    (
        *("status", "role", "version", "model", "revision", "fingerprint", "context_length", "vocab_size", "device"),
        *("weights_dtype", "attention_backend", "kv_layout", "machine", "memory", "pool", "tiers"),
        *("invariants", "invariants_steps_ago", "requests", "queues", "queue_seconds", "retractions"),
        *("preemptions", "counters", "cost_model", "itl_budget", "load_seconds", "http"),
    )
)
"""Fields of ``/server_info`` that a caller other than the admin sees: not the options, ports, peers and the epoch."""

QUESTION_TIMEOUT_SECONDS = 5.0


class ServerInfoAnswer(RootModel[dict[str, Any]]):
    """``GET /server_info``: docs/http-api.md has its fields."""


class Transfer(AnswerBody):
    """A hand-over that is open. ``peer``: the other instance's epoch. ``instance``: the instance it belongs to, from a
    router.
    """

    direction: Literal["sending", "receiving", "moving", "arriving"]
    room: int
    state: str
    rid: str | None
    peer: str | None
    seconds: float
    prompt_tokens: int | None
    reason: str | None
    instance: str | None = None


class TransfersAnswer(AnswerBody):
    """``GET /transfers``."""

    open: int
    transfers: list[Transfer]


class ModelInfo(AnswerBody):
    """``GET /model_info``."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    disaggregation_mode: str


class VersionInfo(AnswerBody):
    """``GET /version``."""

    version: str


@endpoint(VersionInfo)
async def version(request: Request) -> Response:
    """Answer with the server's version."""
    return respond(VersionInfo(version=HttpState.of(request).version))


@endpoint(ServerInfoAnswer)
async def server_info(request: Request) -> Response:
    """Answer with the scheduler's state (pools, queues, role, peers, invariants, options) and that of this process.

    A caller that is not an admin gets the fields in ``FOR_USERS``.
    """
    state = HttpState.of(request)
    try:
        instance = (await state.engine.questions.ask(ServerInfoReq(), QUESTION_TIMEOUT_SECONDS)).info
    except QuestionRefused:
        instance = {"status": "loading"}
    http = {"live_requests": len(state.engine.live), "started": state.started}
    info = {**instance, "version": state.version, "epoch": state.epoch, "http": http}
    if not Caller.of(request.scope).is_admin:
        info = {name: value for name, value in info.items() if name in FOR_USERS}
    return json_response(info)


@endpoint(TransfersAnswer)
async def transfers(request: Request) -> Response:
    """Answer with the number of open hand-overs and migrations, and list up to 1000 of them, the oldest first."""
    engine = HttpState.of(request).engine
    try:
        answer = await engine.questions.ask(TransfersReq(), QUESTION_TIMEOUT_SECONDS)
    except QuestionRefused:  # an instance that still loads has none
        return json_response({"open": 0, "transfers": []})
    return json_response({"open": answer.open, "transfers": answer.transfers})


class GenerationSettings(AnswerBody):
    """``default_generation_settings`` of ``GET /props``. ``n_ctx``: maximum tokens of prompt and output together."""

    n_ctx: int


class Modalities(AnswerBody):
    """What the model takes beside text."""

    vision: bool
    audio: bool


class Props(AnswerBody):
    """``GET /props``. ``total_slots``: requests that run at once."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: Modalities
    build_info: str


@endpoint(Props)
async def props(request: Request) -> Response:
    """Answer with the model's limits and template, with the field names of llama-server."""
    state = HttpState.of(request)
    limits = await state.engine.questions.limits(QUESTION_TIMEOUT_SECONDS)
    return respond(
        Props(
            default_generation_settings=GenerationSettings(n_ctx=limits.context_length),
            total_slots=state.options.max_running_requests,
            model_alias=state.model.name,
            model_path=state.model.path,
            chat_template=state.model.template,
            modalities=Modalities(vision=False, audio=False),
            build_info=f"pdserve {state.version}",
        )
    )


@endpoint(ModelInfo)
async def model_info(request: Request) -> Response:
    """Answer which model is served, with the field names of SGLang."""
    options = HttpState.of(request).options
    return respond(
        ModelInfo(
            model_path=options.model_path,
            tokenizer_path=options.tokenizer_path or options.model_path,
            served_model_name=HttpState.of(request).model.name,
            is_generation=True,
            disaggregation_mode=options.disaggregation_mode,
        )
    )
