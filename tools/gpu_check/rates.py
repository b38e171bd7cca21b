"""What this GPU can do, which speeds are told as shares of: reading, copying and multiplying random numbers.

Times are medians between events of the device, of work that was queued before: no launch is in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from .part import Part
from .record import Check, Finding

ROUNDS = 15


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function that measures the device's read rate, copy rate and multiplying rate."""
    yield "read rate", lambda: Finding("", f"{read_rate(part) / 1e9:.1f} GB/s of random data, read only")
    yield "copy rate", lambda: Finding("", f"{copy_rate(part) / 1e9:.1f} GB/s of random data, read and written")
    yield "multiplying rate", lambda: Finding("", f"{matmul_rate(part) / 1e12:.1f} TFLOP/s in bfloat16")


@cache
def read_rate(part: Part) -> float:
    """Measure the bytes per second at which the device reads 2 GiB of random data, as a decode step does."""
    from .read_kernel import read_all

    data = _random_bytes(part)
    out = torch.zeros(1, dtype=torch.int32, device=part.device)
    return data.nbytes / median_seconds(part, [lambda: read_all(data, out)])


@cache
def copy_rate(part: Part) -> float:
    """Measure the bytes per second, read and written, of copying 2 GiB within the device."""
    source = _random_bytes(part)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(part, [lambda: target.copy_(source)])


@cache
def matmul_rate(part: Part) -> float:
    """Measure the operations per second of a product of two square bfloat16 matrices."""
    size = 256 if part.dry_run else 8192
    a, b = (torch.randn(size, size, device=part.device).bfloat16() for _ in range(2))
    return 2 * size**3 / median_seconds(part, [lambda: a @ b])


def median_seconds(part: Part, calls: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> float:
    """Run all ``calls`` one after another, ``rounds`` times, and return the median time of one call, in seconds.

    On a GPU they are one graph, replayed: a launch from Python takes longer than a short kernel. So each must be
    capturable. Several calls with other data each keep the caches from holding it.
    """
    if part.dry_run:
        return _by_clock(calls, 2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in events]
    return statistics.median(times) / 1e3 / len(calls)


def _by_clock(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / len(calls)


def _random_bytes(part: Part) -> Tensor:
    """Return 2 GiB of random int32 on the device; 64 KiB in a dry run. Zeros could be kept in less memory."""
    count = 1 << (14 if part.dry_run else 29)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=part.device)
