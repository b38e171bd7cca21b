"""The control groups around this process, versions 1 and 2: what they allow of the processor and of memory.

A limit of any group counts for all groups inside it, so the tightest of those around the process is the one that it
feels. Everything is read from two folders, so that a made tree can stand for any host or container.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..cpu_list import parse_kernel_list

UNLIMITED = 1 << 60
"""Bytes; version 1 writes "no limit" as a number a little below 2**63."""


class SystemTree(NamedTuple):
    """Where the kernel shows what it knows."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


class Group(NamedTuple):
    """One control group; ``is_v2`` says how its files are called."""

    folder: Path
    is_v2: bool


class MemoryLimit(NamedTuple):
    """Bytes. ``used`` leaves out file cache that the kernel drops before it refuses memory."""

    limit: int
    used: int


def cpu_quota(tree: SystemTree) -> float | None:
    """Return the CPU time that the groups allow, in cores (0.5: half of one core's time); None without a limit."""
    quotas = [quota for group in _groups(tree, "cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def cpuset(tree: SystemTree) -> frozenset[int] | None:
    """Return the cores that the groups allow; None if no group limits them."""
    allowed: frozenset[int] | None = None
    for group in _groups(tree, "cpuset"):
        names = ("cpuset.cpus.effective",) if group.is_v2 else ("cpuset.effective_cpus", "cpuset.cpus")
        file = next((group.folder / name for name in names if (group.folder / name).is_file()), None)
        cores = frozenset(parse_kernel_list(file.read_text())) if file is not None else frozenset()
        if cores:
            allowed = cores if allowed is None else allowed & cores
    return allowed


def memory_limits(tree: SystemTree) -> list[MemoryLimit]:
    """Return the memory limit of each control group around this process that has one, and the use of each, in bytes."""
    limits = []
    for group in _groups(tree, "memory"):
        names = ("memory.max", "memory.current") if group.is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit_file, used_file = (group.folder / name for name in names)
        if limit_file.is_file() and (limit := _read_bytes(limit_file)) < UNLIMITED:
            limits.append(MemoryLimit(limit, _read_bytes(used_file) - _reclaimable(group.folder)))
    return limits


def _groups(tree: SystemTree, controller: str) -> Iterator[Group]:
    """Yield the groups around this process that may have limits of ``controller``, the innermost first."""
    membership, root = tree.proc / "self/cgroup", tree.sys / "fs/cgroup"
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if is_v2:
            # Hosts that run both versions side by side mount the second one in here.
            base = root / "unified" if (root / "unified").is_dir() else root
        elif controller in controllers.split(","):
            base = _v1_mount(root, controller)
        else:
            continue
        # A container sees its own group as the root, while the path still starts at the host's root. In a namespace of
        # its own, the path may even point above that root.
        group = base if ".." in Path(path).parts else base / path.lstrip("/")
        yield from (Group(folder, is_v2) for folder in (group, *group.parents) if folder.is_relative_to(base))


def _v1_mount(root: Path, controller: str) -> Path:
    """Return the folder where ``controller`` is mounted.

    Controllers may be mounted together ("cpu,cpuacct"), with or without a link for each.
    """
    if not (root / controller).is_dir() and root.is_dir():
        for folder in root.iterdir():
            if controller in folder.name.split(","):
                return folder
    return root / controller


def _quota(group: Group) -> float | None:
    if group.is_v2:
        file = group.folder / "cpu.max"
        quota, _, period = file.read_text().partition(" ") if file.is_file() else ("max", "", "")
        return None if quota.strip() == "max" else int(quota) / int(period or 100_000)
    quota_file, period_file = group.folder / "cpu.cfs_quota_us", group.folder / "cpu.cfs_period_us"
    if not quota_file.is_file() or int(quota_file.read_text()) <= 0:
        return None
    return int(quota_file.read_text()) / int(period_file.read_text())


def _read_bytes(file: Path) -> int:
    text = file.read_text().strip()
    return UNLIMITED if text == "max" else int(text)


def _reclaimable(group: Path) -> int:
    stat = group / "memory.stat"
    if not stat.is_file():
        return 0
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
