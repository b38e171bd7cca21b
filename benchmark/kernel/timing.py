"""How long a kernel takes on a GPU, beside the rates at which this GPU copies and multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.runtime.driver import driver

from ..errors import BenchError
from .case import Case

QUANTILES = (0.5, 0.1, 0.9)
WARM_UPS, LEAST_RUNS = 5, 10
LEAST_WAIT = 1e-4
"""Seconds that the GPU waits before each run, besides three times what the host takes to launch it."""
MAX_HERTZ = 2e9
"""Clock rate of a GPU that a wait's cycles are counted for. With a lower one it waits longer."""
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
    """Return the times that the GPU takes for one run of the case, with cold caches. Raises ``BenchError``.

    ``seconds``: how long to measure.
    """
    try:
        return _times(case.run, seconds)
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
    """Return the times of the kernels of ``run``, with their launches hidden.

    The GPU waits until the host has launched all of them. As a CUDA graph they would take several microseconds more,
    those of the graph's own launch.
    """
    cache = driver.active.get_empty_cache_for_benchmark()
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    wait = round((LEAST_WAIT + 3 * (time.perf_counter() - begin)) * MAX_HERTZ)

    def queue() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        driver.active.clear_cache(cache)
        torch.cuda._sleep(wait)  # type: ignore[no-untyped-call]
        before.record()
        run()
        after.record()
        return before, after

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(WARM_UPS):
        queue()
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) / WARM_UPS
    events = [queue() for _ in range(max(LEAST_RUNS, round(seconds / each)))]
    torch.cuda.synchronize()
    return Times(*np.quantile([before.elapsed_time(after) / 1e3 for before, after in events], QUANTILES).tolist())
