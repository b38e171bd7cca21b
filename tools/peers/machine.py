"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.model_runner.cpu_engine.build import BuildError, choose_level

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
IDLE_WINDOW = 2.0
"""Seconds over which the processors must be idle."""
IDLE_SHARE = 0.95
IDLE_PATIENCE = 120.0


@dataclass(frozen=True)
class Machine:
    """``level``: of pdserve's kernels. Results of the same processor, cores and level can be compared."""

    processor: str
    cores: int
    features: str
    level: str

    @property
    def line(self) -> str:
        """Processor, number of cores, CPU features and kernel level, in words."""
        features = f" ({self.features})" if self.features else ""
        return f"{self.processor}, {self.cores} cores{features}, kernels of level {self.level}"

    @property
    def slug(self) -> str:
        """Part of a file name that differs for each processor, number of cores and kernel level."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.processor} {self.cores} cores {self.level}".lower()).strip("-")


def this_machine() -> Machine:
    """Describe this machine, at the level of CPU kernels that pdserve would choose."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    features = ", ".join(feature for feature in FEATURES if feature in known)
    name = model[1] if model else platform.processor() or platform.machine()
    try:
        level = choose_level().name
    except BuildError:
        level = "none (torch computes)"
    return Machine(name.replace("(R)", ""), len(os.sched_getaffinity(0)), features, level)


def wait_idle(limit: float) -> bool:
    """Wait until no other process uses the processors. Returns False if ``limit`` seconds pass first.

    What a measured engine leaves behind (processes that still end, memory that is given back) is the next one's noise.
    """
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = _cpu_ticks()
        time.sleep(IDLE_WINDOW)
        idle, total = (b - a for a, b in zip(before, _cpu_ticks(), strict=True))
        if idle >= IDLE_SHARE * total:
            return True
    return False


def _cpu_ticks() -> tuple[int, int]:
    """Return the ticks that all processors were idle since boot, waits for a disk included, and all ticks."""
    fields = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
