"""Random weights: every speed, none of the sense. For tests and benchmarks without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .arrays import Array
from .base import WeightSource
from .tensors import to_array

STD = 0.02
PERIOD = 4_194_301
"""Values that are drawn of a tensor; larger ones repeat them, as drawing billions takes minutes. A prime, so that rows
differ.
"""


class DummyWeights(WeightSource):
    """Normal weights from ``seed``, the same in every process; norms scale by one, biases are drawn like weights."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield ones for the weights of norms, and normal numbers of standard deviation ``STD`` for everything else.

        Numbers of a large tensor repeat after ``PERIOD`` of them.
        """
        generator = torch.Generator().manual_seed(self._seed)
        for name, shape in self._shapes.items():
            if len(shape) == 1 and name.endswith(".weight"):
                yield name, to_array(torch.ones(shape))
            else:
                size = math.prod(shape)
                drawn = torch.empty(min(size, PERIOD)).normal_(0.0, STD, generator=generator)
                whole = drawn if size <= PERIOD else drawn.repeat(-(-size // PERIOD))[:size]
                yield name, to_array(whole.view(shape))
