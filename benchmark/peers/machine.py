"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def describe_machine() -> str:
    """Processor, cores and the instruction sets that matter, in one line."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    features = ", ".join(feature for feature in FEATURES if feature in known)
    cores = len(os.sched_getaffinity(0))
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {cores} cores" + (f" ({features})" if features else "")
