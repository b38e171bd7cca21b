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
        """Exchange parts with all ranks, and return their sum, [T, N] of the parts' type, added up in float32."""
        ...

    def join(self, columns: Tensor) -> Tensor:
        """Gather the logits that each rank has for its part of the vocabulary; return them side by side: [L, V].

        ``columns``: this rank's logits, about V / R columns with R ranks.
        """
        ...

    def meet(self) -> None:
        """Wait until all ranks have called this; a device only queues the wait."""
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
