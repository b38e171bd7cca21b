"""The rules of the logit edits for Triton's kernels, on blocks of a row's logits (float32).

They follow the rules in torch operation by operation. Products go by float64, which holds them exactly, as a fused
multiply-add would round once where the CPU rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_bias(logits: tl.tensor, biases: tl.tensor) -> tl.tensor:
    """Return ``logits`` plus the request's ``biases`` (float32) of the same tokens, as ``Bias`` does."""
    return logits + biases


@triton.jit
def penalise(
    logits: tl.tensor,
    is_seen: tl.tensor,
    outputs: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> tl.tensor:
    """Return ``logits`` after the row's penalties, as ``Penalties`` computes them.

    ``is_seen``: whether a token is in prompt or output. ``outputs``: int32, how often it was output. The last three
    arguments: the row's penalties, float64.
    """
    factor = tl.zeros_like(logits) + repetition.to(tl.float32)
    by_frequency = (frequency * outputs.to(tl.float64)).to(tl.float32)
    by_presence = tl.where(outputs > 0, presence.to(tl.float32), 0.0)
    multiplied = (logits.to(tl.float64) * factor.to(tl.float64)).to(tl.float32)
    repeated = tl.where(logits > 0, tl.div_rn(logits, factor), multiplied)
    return tl.where(is_seen, repeated - (by_frequency + by_presence), logits)


@triton.jit
def ban_stops(logits: tl.tensor, is_stop: tl.tensor, is_short: tl.tensor) -> tl.tensor:
    """Return ``logits`` with -inf for stop tokens if the row ``is_short``, as ``EarlyStop`` does.

    ``is_short``: whether the row's output has fewer than ``min_new_tokens`` tokens.
    """
    return tl.where(is_short & is_stop, -float("inf"), logits)
