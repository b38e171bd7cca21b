"""How many prompt tokens a step may compute.

There are two limits. The one on tokens is ``--chunked-prefill-size`` and, if requests decode, ``--mixed-chunk-size``.
The one on time is the ITL budget (``itl_budget.py``). It applies if a request that has its first token waits for the
step:

- a request that decodes in it, or could not for lack of memory;
- a request with KV on its way here, which may arrive while the step runs.

Any other step delays no stream of tokens. But a prompt that comes meanwhile waits for it, and for the step planned
after it. So by default, on a processor, such a step takes at most ``CPU_ALONE_MS``, or ``MOST_ALONE`` times what a
single token takes. CPU kernels compute pieces of 64 tokens as fast as those of 512.

A prompt is never starved. Not one token may be within the limit: outcomes scatter, attention reads a very long prompt,
or the kernels' curve jumps at just this batch. Then every ``PATIENCE``-th step takes what the estimate itself allows,
without the margin for scatter, and ``LEAST_PIECE`` tokens if even that is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..runtime.disaggregation_options import DisaggregationMode
from .estimates.cost_model import CostModel, StepShape
from .itl_budget import ItlBudget
from .options import SchedulerOptions
from .role import CurrentRole

ROLES: tuple[DisaggregationMode, ...] = ("unified", "prefill", "decode")
CPU_CHUNK = 512
CPU_MIXED_CHUNK = 128
DECODE_MIXED_CHUNK = 16
CHUNK = 2048
CPU_ITL_BUDGET_MS = 40.0
CPU_ALONE_MS, MOST_ALONE, LEAST_ALONE = 250.0, 8.0, 64
"""Limits of a step without decodes. It may have ``LEAST_ALONE`` tokens whatever they take."""
CPU_TTFT_TARGET_MS = 3000.0
LEAST_PIECE = 4
PATIENCE = 4


@dataclass(slots=True)
class StepAllowance:
    """Prompt tokens and milliseconds that a step has left.

    ``limit_ms``: promised to requests that wait for it; infinite if none do.
    """

    tokens: int
    limit_ms: float = math.inf
    forward_ms: float = math.inf
    """The largest estimate that keeps ``limit_ms``."""
    at_least: int = 0
    """Tokens that may be computed whatever they take."""
    copy_ms: float = 0.0
    """Milliseconds that copies between the tiers take before the step."""

    @property
    def is_timed(self) -> bool:
        """Whether a time limit holds for the step, because a request with a first token waits for it."""
        return self.forward_ms < math.inf

    def add_copies(self, ms: float) -> None:
        """Deduct the milliseconds of copies that the worker makes before the step."""
        self.copy_ms += ms
        self.forward_ms -= ms

    def close(self) -> None:
        """Set the allowance to 0 tokens, so that no prompt gets a further piece."""
        self.tokens = 0

    def take(self, tokens: int) -> None:
        """Deduct the ``tokens`` of a piece that was added to the step."""
        self.tokens -= tokens
        self.at_least = max(0, self.at_least - tokens)


class StepBudget:
    """Gives each step its allowance.

    ``may_cut``: whether a prompt may be computed in pieces. ``itl``: None without a promise.
    """

    def __init__(
        self,
        model: CostModel,
        alone: int,
        mixed: dict[DisaggregationMode, int],
        role: CurrentRole,
        *,
        may_cut: bool,
        itl_ms: float,
        ttft_target_ms: float = 0.0,
        alone_ms: float = math.inf,
    ) -> None:
        self._role = role
        self.may_cut = may_cut
        self.itl = ItlBudget(itl_ms, model, ttft_target_ms) if itl_ms else None
        self._model = model
        self._alone, self._mixed = alone, mixed
        self._alone_ms = alone_ms
        self._refused = 0

    @classmethod
    def of(cls, options: SchedulerOptions, device: str, model: CostModel, role: CurrentRole) -> StepBudget:
        """Make the budget from the options; what they leave open suits the worker's ``device``."""
        chunk, mixed, most = options.chunked_prefill_size, options.mixed_chunk_size, options.max_prefill_tokens
        if chunk == -1:
            return cls(model, most, dict.fromkeys(ROLES, most), role, may_cut=False, itl_ms=0.0)
        on_cpu = device.startswith("cpu")
        itl_ms = options.itl_budget_ms
        if itl_ms is None:
            itl_ms = CPU_ITL_BUDGET_MS if on_cpu else 0.0
        alone_ms = CPU_ALONE_MS if chunk is None and on_cpu else math.inf
        if chunk is None:
            chunk = max(CPU_CHUNK if on_cpu else CHUNK, options.page_size)
        if mixed is None and (itl_ms or not on_cpu):
            mixed = chunk
        by_role = {r: min(mixed or _fixed_mixed_chunk(r, options.page_size), chunk, most) for r in ROLES}
        target_ms = options.ttft_target_ms
        if target_ms is None:
            target_ms = CPU_TTFT_TARGET_MS if on_cpu else 0.0
        limits = {"itl_ms": itl_ms, "ttft_target_ms": target_ms, "alone_ms": alone_ms}
        return cls(model, min(chunk, most), by_role, role, may_cut=True, **limits)

    def allowance(self, decodes: StepShape, *, awaited: bool, refused: int | None = None) -> StepAllowance:
        """Return the allowance for prompts, in tokens and time, of a step with these ``decodes``.

        ``awaited``: whether other requests with a first token wait for the step, too. ``refused``: how many steps
        before it had no room for prompts; None for the actual number. After ``PATIENCE - 1`` of them a few tokens are
        allowed anyway.
        """
        refused = self._refused if refused is None else refused
        tokens = self._mixed[self._role.mode] if decodes.decodes else self._tokens_alone()
        if self.itl is None or not (decodes.decodes or awaited):
            return StepAllowance(tokens)
        limit_ms = self.itl.limit_ms(decodes)
        # Without decodes there is nothing else to do, and no gap has begun that scatter could stretch.
        if decodes.decodes and refused < PATIENCE - 1:
            return StepAllowance(tokens, limit_ms, self.itl.forward_ms(limit_ms))
        return StepAllowance(tokens, limit_ms, limit_ms - self._model.overhead_ms, LEAST_PIECE)

    def _tokens_alone(self) -> int:
        """Return the maximum prompt tokens of a step that no request with a first token waits for.

        A limit of time lowers it on a CPU, but not below ``LEAST_ALONE``.
        """
        if self._alone_ms == math.inf or self._alone <= LEAST_ALONE:
            return self._alone
        limit_ms = max(self._alone_ms, MOST_ALONE * self._model.estimate(StepShape(decodes=1)))
        return max(LEAST_ALONE, self._model.tokens_within(limit_ms, StepShape(), 0, self._alone))

    def fitting(self, allowance: StepAllowance, shape: StepShape, start: int, wanted: int) -> int:
        """Return how many of ``wanted`` prompt tokens fit into ``allowance``. The step has ``shape`` already.

        They follow ``start`` tokens of their prompt. Nothing is deducted from ``allowance``.
        """
        most = min(wanted, allowance.tokens)
        if not allowance.is_timed:
            return most
        return max(self._model.tokens_within(allowance.forward_ms, shape, start, most), min(allowance.at_least, most))

    def planned(self, *, refused: bool) -> None:
        """Note that a step was planned. ``refused``: there were prompts to compute, and none of them got a token."""
        self._refused = self._refused + 1 if refused else 0


def _fixed_mixed_chunk(role: DisaggregationMode, page_size: int) -> int:
    """Return the mixed chunk without a limit of time: 100 tokens use all of a CPU's arithmetic, more only lengthen
    gaps.

    A decode instance exists for short gaps, and a prompt that it computes itself is the exception.
    """
    return DECODE_MIXED_CHUNK if role == "decode" else max(CPU_MIXED_CHUNK, page_size)
