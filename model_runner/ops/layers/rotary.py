"""Rotary position embedding (Su et al., 2021) and its stretched variants.

Heads are in the order of ``model_files/rope_order.py``: pair ``i`` is ``i`` and ``i + head_dim / 2``, and those behind
the rotated ones turn by an angle of 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....model_files.rope_frequencies import attention_factor, inverse_frequencies
from ....model_files.spec import RopeSpec


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
        self.inv_freq = torch.cat((torch.from_numpy(inverse_frequencies(rope)), unrotated)).to(device)
        scales = torch.full((rope.rotary_dim // 2,), attention_factor(rope))
        self.scale = torch.cat((scales, unrotated + 1.0)).to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """Return cosines and sines of ``positions`` [T]: the nearest float32, cast to the model's type.

        They are computed in float64, so that every device has the bits of the CPU engine's tables. The first half of
        the sines is negated.
        """
        angles = (positions.to(torch.float32)[:, None] * self.inv_freq).to(torch.float64)
        cos, sin = angles.cos().to(torch.float32).mul_(self.scale), angles.sin().to(torch.float32).mul_(self.scale)
        return Rotation(
            torch.cat((cos, cos), -1).to(self._dtype)[:, None], torch.cat((-sin, sin), -1).to(self._dtype)[:, None]
        )
