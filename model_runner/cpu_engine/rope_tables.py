"""Rotations of positions, as the CPU engine reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .structs import RopeTable


class RopeRows(NamedTuple):
    """Addresses of cosines and sines [positions, head_dim / 2], float32.

    Element ``i`` of a head turns with ``i + head_dim / 2``, by the angle at ``i``.
    """

    cos: int
    sin: int


class RopeTables:
    """Tables of a model's ropes, up to ``positions``. The caller keeps their memory."""

    def __init__(self, rows: Sequence[RopeRows], positions: int) -> None:
        self.tables = (RopeTable * len(rows))(*(RopeTable(*addresses) for addresses in rows))
        self.positions = positions
        """Number of positions that the tables reach."""

    def check(self, positions: int) -> None:
        """Raise ``IndexError`` if a pass needs more than the tables have.

        ``positions``: its highest position, plus 1.
        """
        if positions > self.positions:
            raise IndexError(f"a pass reaches position {positions - 1}, the tables of rotations have {self.positions}")
