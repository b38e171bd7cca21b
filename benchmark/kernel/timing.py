"""How long a kernel takes on a GPU, beside the rates at which this GPU copies and multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from ..errors import BenchError
from .case import Case

QUANTILES = (0.5, 0.1, 0.9)
WARM_UP_MS = 25
COPIED_BYTES = 1 << 30
MATRIX = 8192


class Times(NamedTuple):
    """Seconds: the median, and what 10 % and 90 % of the runs stay below."""

    median: float
    low: float
    high: float


class Rates(NamedTuple):
    """``copy``: bytes a second, read and written. ``multiply``: operations a second of a square product."""

    copy: float
    multiply: float


class Roofline(NamedTuple):
    """``bound``: seconds that the work takes at the GPU's rates; ``by``: which of the two bounds it."""

    bound: float
    by: str


def measure(case: Case, seconds: float) -> Times:
    """Return the times of one run of the case, replayed as a CUDA graph with cold caches. Raises ``BenchError``.

    ``seconds``: how long to measure.
    """
    try:
        case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.run()
        return _times(graph.replay, seconds)
    except RuntimeError as e:
        raise BenchError(f"it does not run: {str(e).strip().splitlines()[0]}") from None


def measure_rates(dtype: torch.dtype) -> Rates:
    """Measure how fast this GPU copies memory, and multiplies square matrices of ``dtype``; both with random data."""
    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _times(lambda: target.copy_(source), 0.2).median
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    return Rates(copy, 2 * MATRIX**3 / _times(lambda: a @ b, 0.2).median)


def roofline(nbytes: int, operations: int, rates: Rates) -> Roofline:
    """Return the least time that this work takes at ``rates``, and whether memory or arithmetic bounds it."""
    by_memory, by_arithmetic = nbytes / rates.copy, operations / rates.multiply
    if by_memory >= by_arithmetic:
        return Roofline(by_memory, f"memory at {rates.copy / 1e9:.0f} GB/s")
    return Roofline(by_arithmetic, f"arithmetic at {rates.multiply / 1e12:.0f} TFLOP/s")


def _times(run: Callable[[], Tensor | None], seconds: float) -> Times:
    # It clears the second-level cache before each run, and takes times by events.
    found = do_bench(run, warmup=WARM_UP_MS, rep=max(1, round(seconds * 1e3)), quantiles=QUANTILES)
    return Times(*(milliseconds / 1e3 for milliseconds in found))
