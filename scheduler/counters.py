"""Counts of events since the start: plain numbers, counted where the event happens and shown elsewhere.

A prompt's tokens count when the step that computes them is done, on the instance that computes them. Tokens found in
its prefix cache count as cached there, when the request gets its memory. The other instance of a pair counts neither,
and the instance that computes a prompt for another counts none of the output. So sums over a pair match what clients
received.
"""

from __future__ import annotations

from typing import Any

from ..messages.metrics import Histogram
from ..messages.worker import StepResult
from ..runtime.metrics import Metrics, counter, histogram
from .req import Req, ReqState, Route
from .step_builder import InFlightStep

STEP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)


class Counters:
    """Counters for ``/server_info`` and metrics. They cost a microsecond a step, and an addition a token."""

    def __init__(self) -> None:
        self.requests = 0
        self.finished = 0
        self.handed_over = 0
        self.declined = 0
        self.moved = 0
        self.aborted = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.recomputed_tokens = 0
        self.decode_tokens = 0
        self.generation_tokens = 0
        self.step_seconds = Histogram(STEP_SECONDS)
        self.steps = 0
        self.compiled_kernels = 0

    def step_done(self, step: InFlightStep, result: StepResult) -> None:
        """Count a finished step: its tokens, its duration and the kernels compiled for it."""
        shape = step.step_estimate.shape
        self.steps += 1
        self.decode_tokens += shape.decodes
        self.prompt_tokens += shape.prompt_tokens - step.recomputed
        self.recomputed_tokens += step.recomputed
        self.step_seconds.observe(result.forward_ms / 1000)
        self.compiled_kernels += result.compiled_kernels

    def ended(self, req: Req) -> None:
        """Count a request that has ended, by its state. A hand-over ends one leg here, not the client's request."""
        self.finished += req.state is ReqState.FINISHED and req.route is not Route.OUTGOING
        # The forks of a prompt that is handed over end here, too. They are no hand-overs of their own.
        is_leg = req.route is Route.OUTGOING and not req.msg.fork_of
        self.handed_over += req.state is ReqState.FINISHED and is_leg
        # Ended here and continuing elsewhere: a leg with a prompt that the decode computes, or a running request.
        self.declined += req.state is ReqState.MOVED and req.route is Route.OUTGOING
        self.moved += req.state is ReqState.MOVED and req.route is not Route.OUTGOING
        self.aborted += req.state is ReqState.ABORTED
        self.failed += req.state is ReqState.FAILED

    def info(self) -> dict[str, Any]:
        """Return the counts and the total seconds of forward passes since the start, JSON-ready."""
        counts = {name: value for name, value in vars(self).items() if name != "step_seconds"}
        return counts | {"forward_seconds": round(self.step_seconds.total, 6)}


METRICS: Metrics[Counters] = (
    counter(
        "pdserve_recomputed_tokens_total", "Tokens computed again after a retraction.", lambda c: c.recomputed_tokens
    ),
    counter(
        "pdserve_compiled_kernels_total",
        "GPU kernels compiled while serving, each of which stalled all streams.",
        lambda c: c.compiled_kernels,
        note="A stall takes seconds; the log names the kernels. Always 0 on a CPU, and a bug elsewhere.",
    ),
    histogram("pdserve_step_duration_seconds", "Duration of forward passes.", lambda c: c.step_seconds),
    counter(
        "pdserve_step_tokens_total",
        "Tokens that went through the model, wanted or not.",
        lambda c: {"prefill": c.prompt_tokens + c.recomputed_tokens, "decode": c.decode_tokens},
        "phase",
        note="Phases: `prefill`, `decode`.",
    ),
)
