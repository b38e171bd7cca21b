"""Endpoints that answer questions about the instance, and admin orders such as flushing the cache."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....messages.control import FlushCacheReq, ServerInfoReq, TransfersReq
from ....messages.sampling import SamplingParams
from ....runtime.web.auth import NO_ADMIN_KEY
from ....runtime.web.json_response import json_response
from ....runtime.web.keys import ANYBODY, Caller
from ..engine.plan import Prompt, PromptPlan
from ..engine.question_client import QuestionRefused
from ..errors import ApiError, ClientGone
from ..generation.engine_response import watch_disconnect
from ..parsing import parse_body
from ..state import HttpState
from .schemas import AbortBody

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
HEALTH_GENERATE_TIMEOUT_SECONDS = 20.0


async def health(request: Request) -> Response:
    """200 when every process of the instance answers and it takes requests, else 503 with the reason."""
    verdict = await HttpState.of(request).health.verdict()
    if not verdict.ready:
        raise ApiError(503, verdict.reason, code="hangs" if verdict.hangs else None)
    answer: dict[str, Any] = {"status": "ready"}
    if verdict.identity is not None:
        answer |= msgspec.structs.asdict(verdict.identity)
    if verdict.pace is not None:
        answer["pace"] = msgspec.structs.asdict(verdict.pace)
    return json_response(answer | ({"warning": verdict.reason} if verdict.reason else {}))


async def livez(request: Request) -> Response:
    """200 while this process answers at all; says nothing about the others."""
    return json_response({"status": "alive"})


async def health_generate(request: Request) -> Response:
    """200 when a token has really been generated within the time limit, else 503 with the reason."""
    engine = HttpState.of(request).engine
    plan = PromptPlan(
        prompt=Prompt(text="1"),
        sampling=SamplingParams(seed=0, max_new_tokens=1, temperature=0.0, ignore_eos=True),
        n=1,
        rid=f"health-{secrets.token_hex(8)}",
        keep_output=True,
        logprobs=None,
        bootstrap=None,
        extra_key="",
    )
    submission = await engine.submit([plan], streaming=False)
    try:
        async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_SECONDS), watch_disconnect(request.receive, submission):
            await submission.finished()
    except TimeoutError:
        raise ApiError(503, f"no token within {HEALTH_GENERATE_TIMEOUT_SECONDS:g} s") from None
    except ClientGone:
        return Response()
    finally:
        engine.end(submission)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes: waits for no other process."""
    return await HttpState.of(request).metrics.answer()


async def server_info(request: Request) -> Response:
    """The scheduler's view (pools, queues, role, peers, invariants, options) and this process's; ``FOR_USERS`` of it,
    where the caller is no admin.
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


async def transfers(request: Request) -> Response:
    """The hand-overs that are open, the oldest first."""
    engine = HttpState.of(request).engine
    try:
        answer = await engine.questions.ask(TransfersReq(), QUESTION_TIMEOUT_SECONDS)
    except QuestionRefused:  # an instance that still loads has none
        return json_response({"open": 0, "transfers": []})
    return json_response({"open": answer.open, "transfers": answer.transfers})


async def model_info(request: Request) -> Response:
    """What is served, in SGLang's words."""
    options = HttpState.of(request).options
    content: dict[str, Any] = {
        "model_path": options.model_path,
        "tokenizer_path": options.tokenizer_path or options.model_path,
        "served_model_name": HttpState.of(request).model.name,
        "is_generation": True,
        "disaggregation_mode": options.disaggregation_mode,
    }
    return json_response(content)


async def flush_cache(request: Request) -> Response:
    """Drop every cached prefix; 400 while requests are running."""
    engine = HttpState.of(request).engine
    try:
        result = await engine.questions.ask(FlushCacheReq(), QUESTION_TIMEOUT_SECONDS)
    except QuestionRefused as e:
        raise ApiError(400, e.message) from None
    return json_response({"success": True, "flushed": result.flushed})


async def abort_request(request: Request) -> Response:
    """End one running request, or all; one that is not running is no error. Each still gets its answer, cut short.

    Whoever is not the admin means requests with its own key; without a key, one whose name it knows.
    """
    engine, caller = HttpState.of(request).engine, Caller.of(request.scope)
    body = await parse_body(request, AbortBody)
    if body.abort_all and caller == ANYBODY:
        raise ApiError(401, f"abort_all: {NO_ADMIN_KEY}", param="abort_all")  # without a key nothing is one's own
    count = engine.abort_all(caller) if body.abort_all else engine.abort(body.rid, caller)
    return json_response(count._asdict())
