"""What a step launches: how many kernels, how long they take, and how long the GPU has nothing to do between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from .part import Part


class Kernel(NamedTuple):
    """One kernel or copy that ran, in microseconds."""

    name: str
    begin: float
    end: float


class Summary(NamedTuple):
    """Averages of a step. ``gap_us``: time from the first kernel to the end of the last one in which none ran."""

    kernels: float
    busy_us: float
    gap_us: float

    def __str__(self) -> str:
        return (
            f"{self.kernels:.0f} kernels and copies, {self.busy_us:.0f} µs in them, {self.gap_us:.0f} µs between them"
        )


def profiled(part: Part, run: Callable[[], object]) -> list[Kernel]:
    """Run ``run`` under torch's profiler, and return the GPU kernels and copies that it launched.

    In a dry run torch's operations on the CPU stand in for them.
    """
    kind = ProfilerActivity.CPU if part.dry_run else ProfilerActivity.CUDA
    device = "CPU" if part.dry_run else "CUDA"
    with profile(activities=[kind]) as profiler:
        run()
        if not part.dry_run:
            torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == device and event.cpu_parent is None
    ]


def summarise(kernels: Iterable[Kernel], steps: int) -> Summary:
    """Return how many kernels ran per step, and for how long the GPU was busy and idle, in µs.

    Kernels that overlap count once as busy. Raises ``ValueError`` if there are none.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    if not ordered:
        raise ValueError("the profiler has seen no kernel")
    gap, reached = 0.0, ordered[0].begin
    for kernel in ordered:
        gap += max(0.0, kernel.begin - reached)
        reached = max(reached, kernel.end)
    span = reached - ordered[0].begin
    return Summary(len(ordered) / steps, (span - gap) / steps, gap / steps)


def write_table(kernels: Iterable[Kernel], steps: int, path: Path) -> None:
    """Write a table to ``path``: time and launches per step of each kernel, the longest first."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.end - kernel.begin)
    lines = [f"{'µs a step':>10} {'launches':>9} {'µs each':>8}  kernel"]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        total, count = sum(times), len(times)
        lines.append(f"{total / steps:10.1f} {count / steps:9.1f} {total / count:8.2f}  {name[:120]}")
    path.write_text("\n".join(lines) + "\n")
