"""How much memory this process may have."""

from __future__ import annotations

import os
from typing import NamedTuple

from .control_groups import SystemTree, memory_limits


class Memory(NamedTuple):
    """Memory of a device, in bytes; ``free`` is what can still be taken without pushing anyone out."""

    total: int
    free: int


def host_memory(tree: SystemTree = SystemTree()) -> Memory:  # noqa: B008 - immutable
    """Return total and free memory in bytes: the host's, or less if a control group around this process allows less."""
    lines = (line.split() for line in (tree.proc / "meminfo").read_text().splitlines())
    kib = {fields[0].rstrip(":"): int(fields[1]) for fields in lines}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    for limit, used in memory_limits(tree):
        total = min(total, limit)
        free = max(0, min(free, limit - used))
    return Memory(total, free)


def resident_bytes(tree: SystemTree = SystemTree()) -> int:  # noqa: B008 - immutable
    """Return the resident memory of this process in bytes, with mapped files and shared memory."""
    return int((tree.proc / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def private_bytes(tree: SystemTree = SystemTree()) -> int:  # noqa: B008 - immutable
    """Return the resident memory of this process in bytes, without mapped files and shared memory."""
    resident, shared = (tree.proc / "self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
