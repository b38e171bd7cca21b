"""The machine that runs the tests: what it is, which kernels it runs, and how long a test waits before it calls a hang.

No test judges by the clock: a verdict must not depend on how busy the machine is. A deadline only tells a hang from
slow work. Every deadline goes through ``limit()``, which makes it long enough for a machine with much other work.

Processes that tests start import this for a limit. Torch, which takes most of a second, is imported only by what
measures or asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from pdserve.model_runner.cpu_engine.build import LEVELS, BuildError, choose_level, levels_here

PATIENCE = 5.0
"""Factor of all deadlines: work that shares its cores with other processes may take this many times as long."""
LEAST_SECONDS = 60.0
"""No deadline is shorter."""
VARIABLE = "PDSERVE_TEST_SLOWNESS"
"""How the process that measures the machine's speed tells those that it starts."""
MOST = 10.0
"""Largest factor of limits. Beyond it, something is wrong with the machine and no limit helps."""
# Seconds of each piece of work below on two cores of a Cascade Lake Xeon at 2.5 GHz, for which the limits were written.
INTERPRETER_SECONDS, MEMORY_SECONDS, ARITHMETIC_SECONDS = 0.040, 0.0060, 0.060
N, K = 28800, 576
"""A weight of 66 MB in float32, more than most caches hold."""


def limit(seconds: float) -> float:
    """Return the deadline, in seconds, of something that takes at most ``seconds`` on an idle machine."""
    return max(LEAST_SECONDS, PATIENCE * seconds)


def stretched(seconds: float) -> float:
    """Return ``seconds`` as this machine needs them. For campaigns that have the machine to themselves."""
    return seconds * slowness()


@cache
def slowness() -> float:
    """Return how many times slower this machine is than the reference, at least 1. It is measured once in a
    campaign.
    """
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{min(MOST, max(1.0, *measured())):.2f}"
    return float(os.environ[VARIABLE])


def measured() -> tuple[float, float, float]:
    """Python, a product bound by memory, one bound by arithmetic: how much longer each takes than it should."""
    vector, matrix = products()
    return (
        best(lambda: sum(i * i for i in range(500_000))) / INTERPRETER_SECONDS,
        best(vector) / MEMORY_SECONDS,
        best(matrix) / ARITHMETIC_SECONDS,
    )


def products() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that multiply 1 and 64 rows by a weight, with the kernels of the servers, or else with torch."""
    import torch

    from pdserve.model_runner.cpu_engine.single_kernels import PackedWeight

    weight, rows = torch.ones(N, K), torch.ones(64, K)
    try:
        multiply = PackedWeight(weight, N, K, torch.float32).multiply
    except BuildError:

        def multiply(a: torch.Tensor) -> torch.Tensor:
            return a @ weight.T

    return lambda: multiply(rows[:1]), lambda: multiply(rows)


def best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of five runs, which other processes disturb least."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the system gives it."""
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown processor"


def kernels() -> str:
    """Return the level of the kernels in this process and its children, and how they fetch weights."""
    from pdserve.model_runner.cpu_engine.library import fetch_hint

    try:
        return f"{choose_level().name}, weights fetched with hint {fetch_hint().name.lower().replace('_', '-')}"
    except BuildError as e:
        return f"none ({str(e).splitlines()[0]})"


def levels(tested: Iterable[str]) -> str:
    """Say which levels ran, could have run, and can't run here. ``tested`` ran beside the chosen level."""
    try:
        ran = {choose_level().name, *tested}
    except BuildError:
        ran = set(tested)
    here = [level.name for level in levels_here()]
    return "; ".join(
        f"{what}: {', '.join(names) or 'none'}"
        for what, names in (
            ("run", [name for name in here if name in ran]),
            ("not run, though this processor can", [name for name in here if name not in ran]),
            ("beyond this processor", [level.name for level in LEVELS if level.name not in here]),
        )
    )
