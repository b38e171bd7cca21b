"""Rotary position embedding (Su et al., 2021) and its stretched variants.

Heads are in the order of ``model_files/rope_order.py``: pair ``i`` is ``i`` and ``i + head_dim / 2``, and those behind
the rotated ones turn by an angle of 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....model_files.spec import RopeSpec, RopeType


class Rotation(NamedTuple):
    """What one pass rotates by, as ``kernels.rope`` wants it: two tensors [T, 1, head_dim]."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Turns positions into rotations, a pass at a time: a table of all positions would cost more than it saves.

    ``inv_freq`` (radians per token) and ``scale`` (of cosines and sines): [head_dim / 2] float32.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        unrotated = torch.zeros((head_dim - rope.rotary_dim) // 2)
        self._dtype = dtype
        self.inv_freq = torch.cat((inverse_frequencies(rope), unrotated)).to(device)
        scales = torch.full((rope.rotary_dim // 2,), attention_factor(rope))
        self.scale = torch.cat((scales, unrotated + 1.0)).to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """Return cosines and sines of ``positions`` [T], computed in float32 and then cast to the model's type.

        The first half of the sines is negated.
        """
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos().mul_(self.scale), angles.sin().mul_(self.scale)
        return Rotation(
            torch.cat((cos, cos), -1).to(self._dtype)[:, None], torch.cat((-sin, sin), -1).to(self._dtype)[:, None]
        )


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Return the radians per token of each of the rotary_dim / 2 pairs, float32, on the CPU.

    Raises ``ValueError`` if longrope's factors are not chosen yet.
    """
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    match rope.type:
        case RopeType.LINEAR:
            inv_freq = inv_freq / rope.factor
        case RopeType.LLAMA3:
            inv_freq = _llama3(inv_freq, rope)
        case RopeType.YARN:
            inv_freq = _yarn(inv_freq, rope)
        case RopeType.DEFAULT | RopeType.LONGROPE:
            pass
    if rope.long_factors:
        raise ValueError("with_context() has not chosen between the short factors and the long ones")
    if rope.freq_factors:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inv_freq


def attention_factor(rope: RopeSpec) -> float:
    """Return the factor of cosines and sines, by which YaRN and LongRoPE sharpen attention; 1 for other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type != RopeType.YARN or rope.factor <= 1:
        return 1.0
    return 0.1 * math.log(rope.factor) + 1.0


def _llama3(inv_freq: Tensor, rope: RopeSpec) -> Tensor:
    """Divide the frequencies of long waves by the factor, keep short waves, and blend those between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((rope.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeSpec) -> Tensor:
    """Stretch the frequencies by YaRN (Peng et al., 2023).

    Pairs that turn often in the trained context stay as they are; those that turn rarely are stretched.
    """
    dim = rope.rotary_dim

    def pair_that_turns(times: float) -> float:
        turns = rope.original_context / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    # Where both are the same pair, the step from one to the other is a steep one.
    stretch = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return stretch * inv_freq / rope.factor + (1 - stretch) * inv_freq
