"""Rotary position embedding (Su et al., 2021) and its stretched variants."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...model_files.config import RopeConfig, RopeType


class Rotation(NamedTuple):
    """What one pass rotates by, as ``kernels.rope`` wants it: two tensors [T, 1, head_dim]."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Turns positions into rotations, a pass at a time: a table of all positions would cost more than it saves."""

    def __init__(self, config: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._inv_freq = inverse_frequencies(config, head_dim).to(device)
        self._scale = _attention_scale(config)

    def forward(self, positions: Tensor) -> Rotation:
        """The rotations of ``positions`` [T], computed in float32."""
        angles = positions.to(torch.float32)[:, None] * self._inv_freq
        cos, sin = angles.cos().mul_(self._scale), angles.sin().mul_(self._scale)
        return Rotation(
            torch.cat((cos, cos), -1).to(self._dtype)[:, None], torch.cat((-sin, sin), -1).to(self._dtype)[:, None]
        )


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per token for each of the head_dim / 2 pairs, float32, on the CPU."""
    inv_freq = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match config.type:
        case RopeType.LINEAR:
            inv_freq = inv_freq / config.factor
        case RopeType.LLAMA3:
            inv_freq = _llama3(inv_freq, config)
        case RopeType.YARN:
            inv_freq = _yarn(inv_freq, config, head_dim)
        case RopeType.DEFAULT:
            pass
    if config.freq_factors:
        inv_freq = inv_freq / torch.tensor(config.freq_factors, dtype=torch.float32)
    return inv_freq


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones left alone, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((config.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / config.factor + blend * inv_freq


def _yarn(inv_freq: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often in the trained context are left alone, rare ones stretched (YaRN, Peng et al., 2023)."""

    def pair_that_turns(times: float) -> float:
        turns = config.original_context / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    first = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(config.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return stretch * inv_freq / config.factor + (1 - stretch) * inv_freq


def _attention_scale(config: RopeConfig) -> float:
    """YaRN sharpens attention by scaling q and k; every other variant leaves them."""
    if config.type != RopeType.YARN or config.factor <= 1:
        return 1.0
    return config.attention_factor or 0.1 * math.log(config.factor) + 1.0
