"""The rotations of positions, as the CPU engine reads them: tables that grow with the longest text so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..ops.layers.rotary import Rotation
from .structs import RopeTable

GROWTH = 1024
"""Positions that tables grow by."""


class Rope(Protocol):
    """What turns positions into rotations; ``RotaryEmbedding`` does."""

    def forward(self, positions: Tensor) -> Rotation:
        """The rotations of ``positions`` [T]: cosines and sines [T, 1, head_dim]."""
        ...


class RopeTables:
    """Cosines and sines [positions, head_dim / 2], float32, for each of a model's ``ropes``, which compute in float32.

    Element ``i`` of a head turns with ``i + head_dim / 2``, by the angle at ``i``.
    """

    def __init__(self, ropes: Sequence[Rope], head_dim: int) -> None:
        self._ropes, self._half = ropes, head_dim // 2
        self._rows: list[tuple[Tensor, Tensor]] = [(torch.empty(0, self._half),) * 2 for _ in ropes]
        self.tables = (RopeTable * len(ropes))()
        """Where they lie now; ``reserve`` moves them."""
        self.positions = 0
        """How many positions they reach."""

    def reserve(self, positions: int) -> None:
        """Extend the tables to ``positions``."""
        if positions <= self.positions:
            return
        end = -(-positions // GROWTH) * GROWTH
        more = torch.arange(self.positions, end)
        for i, rope in enumerate(self._ropes):
            rotation = rope.forward(more)
            # The second halves: those of the sines are not negated.
            cos, sin = (half[:, 0, self._half :] for half in rotation)
            rows = self._rows[i] = (torch.cat((self._rows[i][0], cos)), torch.cat((self._rows[i][1], sin)))
            self.tables[i] = RopeTable(rows[0].data_ptr(), rows[1].data_ptr())
        self.positions = end
