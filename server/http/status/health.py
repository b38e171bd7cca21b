"""``GET /health``, ``/readyz``, ``/livez``, ``/health_generate`` and ``/metrics``: state, for programs that poll it."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....messages.sampling import SamplingParams
from ..answers import AnswerBody, MetricsText, respond
from ..endpoint import endpoint
from ..engine.plan import Prompt, PromptPlan
from ..errors import ApiError, ClientGone
from ..generation.engine_response import watch_disconnect
from ..state import HttpState

HEALTH_GENERATE_TIMEOUT_SECONDS = 20.0


class PaceAnswer(AnswerBody):
    """How fast one more request would decode: milliseconds from one token to the next, and its maximum length.

    ``decode_ms``: without prompts beside it. ``stream_ms``: added by each further request. ``budget_ms``: its limit.
    """

    token_ms: float
    decode_ms: float
    stream_ms: float
    budget_ms: float
    max_tokens: int


class HealthAnswer(AnswerBody):
    """The answer of an instance that can serve. ``warning``: what needs attention nonetheless.

    The rest identifies the instance.
    """

    status: Literal["ready"]
    epoch: str | None = None
    role: Literal["unified", "prefill", "decode"] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    pace: PaceAnswer | None = None
    warning: str | None = None


class LivenessAnswer(AnswerBody):
    """The HTTP process answers."""

    status: Literal["alive"]


@endpoint(HealthAnswer)
async def health(request: Request) -> Response:
    """Answer 200 when every process of the instance answers and it takes requests, else 503 with the reason."""
    verdict = await HttpState.of(request).health.verdict()
    if not verdict.ready:
        raise ApiError(503, verdict.reason, code="hangs" if verdict.hangs else None)
    fields: dict[str, Any] = {}
    if verdict.identity is not None:
        fields |= msgspec.structs.asdict(verdict.identity)
    if verdict.pace is not None:
        fields["pace"] = PaceAnswer(**msgspec.structs.asdict(verdict.pace))
    if verdict.reason:
        fields["warning"] = verdict.reason
    return respond(HealthAnswer(status="ready", **fields))


@endpoint(LivenessAnswer)
async def livez(request: Request) -> Response:
    """Answer 200 while this process answers at all. It tells nothing about the other processes."""
    return respond(LivenessAnswer(status="alive"))


@endpoint(HealthAnswer)
async def health_generate(request: Request) -> Response:
    """Generate one token to test the whole engine: answer 200 if it comes in time, else 503 with the reason."""
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
    return respond(HealthAnswer(status="ready"))


@endpoint(MetricsText)
async def metrics(request: Request) -> Response:
    """Answer a scrape of Prometheus with this process's counts and the scheduler's last report.

    It waits for no other process.
    """
    return await HttpState.of(request).metrics.answer()
