"""Steps of several sizes, timed before the first request comes, so that the time of steps can be estimated.

Small ones run first. On a slow machine, or with a large model, the largest are left out. The scheduler's cost model
assumes the worst of them until it has seen some.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...messages.base import pack_i32
from ...messages.sampling import SamplingParams
from ...messages.worker import ForwardStep, MeasuredStep, RowInit
from .step_runner import StepRunner

LIMIT_MS = 1000.0
"""In all. Start-up takes some seconds anyway."""
REPEATED_MS = 30.0
"""Time from which on a step is not run again: what interrupts it for a millisecond or two hardly changes it."""
FLAT_TOKENS = 16
"""Up to here, steps of different sizes take about the same time, as memory is the bound."""


class _Shape(NamedTuple):
    """``rows`` requests compute ``q_len`` tokens each, from position ``start`` on; one token each is a decode."""

    rows: int
    start: int
    q_len: int

    @property
    def tokens(self) -> int:
        return self.rows * self.q_len

    def measured(self, forward_ms: float) -> MeasuredStep:
        """Return the sizes of this shape's step, with its measured time ``forward_ms``, for the cost model.

        The sizes are decodes, their KV tokens, prompt tokens, and the number of tokens that all prompt tokens attend
        to.
        """
        if self.q_len == 1:
            return MeasuredStep(self.rows, self.rows * self.start, 0, 0.0, forward_ms)
        return MeasuredStep(0, 0, self.q_len, self.q_len * (self.start + self.q_len / 2), forward_ms)


# Both sides of where a processor's bound, or the kernels' strategy, may change; and one that tells attention's part.
SHAPES = (
    _Shape(1, 64, 1),
    _Shape(8, 64, 1),
    _Shape(1, 0, 16),
    _Shape(1, 0, 48),
    _Shape(1, 0, 64),
    _Shape(1, 0, 128),
    _Shape(1, 384, 128),
    _Shape(1, 0, 512),
)


def measure_steps(
    steps: StepRunner, max_reqs: int, context_length: int, page_size: int, *, rehearse: bool = False
) -> list[MeasuredStep]:
    """Run steps of the sizes in ``SHAPES``, and return each one's size and time. Call this after the warm-up.

    Short ones run twice if time allows, and the faster run counts; the largest are skipped if time runs out.
    ``rehearse``: run each once before, uncounted, since on a GPU libraries load what a shape needs at its first use.
    All KV lies in page 0, which stays in the caches, so the time of reading real KV can't be learned from this.
    """
    result: list[MeasuredStep] = []
    spent_ms, expected_ms, tokens = 0.0, 0.0, FLAT_TOKENS
    for shape in SHAPES:
        if shape.rows > max_reqs or shape.start + shape.q_len >= context_length:
            continue
        expected_ms *= max(1.0, shape.tokens / tokens)
        if spent_ms + expected_ms > LIMIT_MS:
            break
        if rehearse:
            _run(steps, shape, page_size)
        forward_ms = _run(steps, shape, page_size)
        spent_ms += forward_ms
        if forward_ms < REPEATED_MS and spent_ms + forward_ms <= LIMIT_MS / 2:
            again = _run(steps, shape, page_size)
            spent_ms += again
            forward_ms = min(forward_ms, again)
        expected_ms, tokens = forward_ms, max(shape.tokens, FLAT_TOKENS)
        result.append(shape.measured(forward_ms))
    return result


def _run(steps: StepRunner, shape: _Shape, page_size: int) -> float:
    rows = np.arange(shape.rows)
    positions = np.tile(np.arange(shape.start, shape.start + shape.q_len), shape.rows)
    step = ForwardStep(
        step_id=0,
        rows=pack_i32(rows),
        starts=pack_i32(np.full_like(rows, shape.start)),
        q_lens=pack_i32(np.full_like(rows, shape.q_len)),
        use_last=pack_i32(np.zeros_like(rows)),
        sample=pack_i32(np.full_like(rows, shape.q_len == 1)),
        input_ids=pack_i32(np.zeros_like(positions)),
        out_cache_loc=pack_i32(positions % page_size),
        new_rows=[greedy_row(row, shape.start) for row in rows.tolist()],
    )
    return steps.run(step).forward_ms


def greedy_row(row: int, prompt_len: int = 1) -> RowInit:
    """Return the start of a request in ``row`` that samples greedily and has no stop tokens."""
    return RowInit(row=row, prompt_len=prompt_len, sampling=SamplingParams(seed=0, temperature=0.0))
