"""Exchange of the torch model with the other tensor-parallel ranks: sums of all parts, and columns side by side.

Sums go in the order of the ranks, not in the order of arrival. So a pass gives the same bits each time, on each rank.
The CPU engine exchanges within its passes instead (``cpu_engine/ranks.py``).

Shapes: T tokens, N hidden size, L wanted rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """All ranks call the same methods in the same order."""

    def sum(self, part_TN: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, [T, N] of the parts' type. It is added up in float32."""
        ...

    def join(self, columns: Tensor) -> Tensor:
        """Join each rank's [L, columns] to [L, V]. A rank has V / R columns, rounded up or down."""
        ...

    def meet(self) -> None:
        """Return when all ranks have come."""
        ...


class _Alone:
    def sum(self, part_TN: Tensor) -> Tensor:
        return part_TN

    def join(self, columns: Tensor) -> Tensor:
        return columns

    def meet(self) -> None:
        pass


alone: RankGroup = _Alone()
"""The one rank of a whole model."""
