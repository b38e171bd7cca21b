"""One kernel at one shape, ready to run: what it computes, what that should be, and the least work that it is.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BenchOptionsError


class Mode(Enum):
    """How kernels run in this process."""

    GPU = "on a GPU"
    INTERPRETED = "in Triton's interpreter"
    ON_PAPER = "not at all: they are compiled"


class Place(NamedTuple):
    """Where a case is made. ``capability``: compute capability times ten."""

    mode: Mode
    device: torch.device
    capability: int

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers with a standard deviation of ``scale``.

        In mode ``ON_PAPER`` they are not drawn.
        """
        return self.drawn(shape, dtype, lambda: torch.randn(shape, device=self.device).mul_(scale).to(dtype))

    def randint(self, end: int, *shape: int) -> Tensor:
        """Return random bytes below ``end``, in the shape ``shape``. In mode ``ON_PAPER`` they are not drawn."""
        draw = lambda: torch.randint(0, end, shape, dtype=torch.uint8, device=self.device)  # noqa: E731
        return self.drawn(shape, torch.uint8, draw)

    def drawn(self, shape: Sequence[int], dtype: torch.dtype, draw: Callable[[], Tensor]) -> Tensor:
        """Return what ``draw`` returns.

        In mode ``ON_PAPER``, return uninitialised memory of that shape and type instead.
        """
        return torch.empty(shape, dtype=dtype, device=self.device) if self.mode is Mode.ON_PAPER else draw()


class Ask(NamedTuple):
    """What the options ask for. ``tile``: the sizes that were given."""

    sizes: Mapping[str, int]
    variant: str
    tile: Mapping[str, int]
    dtype: torch.dtype


class Case(NamedTuple):
    """A kernel to run. ``nbytes`` and ``operations``: the least that it moves and computes."""

    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    """The result in float32, by torch; of random numbers alone."""
    tolerance: float
    """Maximum difference, as a share of the result's scale."""
    tile: Mapping[str, int]
    """All sizes that it runs with."""
    nbytes: int
    operations: int
    scale: Callable[[], Tensor] = lambda: torch.ones(())
    """What a difference is compared with, of the result's shape."""

    def error(self) -> float:
        """Run the kernel once, and return the largest difference from ``expected``, each divided by its ``scale``."""
        difference = (self.run().float() - self.expected()).abs() / self.scale()
        return float(difference.max().item())


def replaced(tile: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    """Return ``tile`` with the sizes in ``given`` in place of its own.

    Raises ``BenchOptionsError`` for a size that has to be a power of two and is none.
    """
    for name, size in given.items():
        if name not in ("least_split", "programs") and size & (size - 1) and name != "num_stages":
            raise BenchOptionsError(f"--tile {name}={size}: it must be a power of two")
    return {**tile, **given}
