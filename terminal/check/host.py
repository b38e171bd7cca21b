"""What the host gives: cores, memory, files, and the places where processes of one host meet."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...mem_cache.kv_pages.region import RegionError, allocate_region
from ...model_runner.device.placement import plan_placement
from ...model_runner.options import WorkerOptions
from ...runtime.machine.control_groups import SystemTree, cpu_quota
from ...runtime.machine.memory import host_memory
from ...runtime.machine.processor import cpu_model
from ...runtime.machine.topology import read_machine
from ...runtime.run_dir import RUN_DIR_CHARS, SOCKET_PATH_CHARS, run_dir_parent
from .finding import Finding, ok, problem, warning

GIB = 2**30
FILES_A_REQUEST = 3
"""A router's: the client's connection, and one to each leg."""
LEAST_FREE = 64 << 20
"""Bytes in the folder for temporary files: sockets and small files."""


def look_at_cores(tree: SystemTree = SystemTree()) -> Iterator[Finding]:  # noqa: B008 - immutable
    """Examine the processor, and the cores that an instance's threads would run on.

    ``tree``: where /proc and /sys are.
    """
    machine = read_machine(tree=tree)
    name = cpu_model(tree.proc / "cpuinfo") or os.uname().machine
    text = f"{name}; an instance takes {plan_placement(None, None, machine).reason}"
    quota = cpu_quota(tree)
    if quota is not None and quota < 1:
        yield warning(
            "processor",
            text,
            "A quota below one core stops every process for part of the time; raise it (docker run --cpus, Kubernetes' "
            "resources.limits.cpu).",
        )
    elif len(machine.allowed) == 1:
        yield warning("processor", text, "On one core every other process takes turns with the one that computes.")
    else:
        yield ok("processor", text)


def look_at_memory(tree: SystemTree = SystemTree()) -> Iterator[Finding]:  # noqa: B008 - immutable
    """Examine the free memory within the control groups; warn if less than a tenth is free.

    Whether a model fits is not examined here. ``tree``: where /proc and /sys are.
    """
    memory = host_memory(tree)
    text = f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free, within the limits of the control groups"
    if memory.free < memory.total / 10:
        advice = (
            "Below a tenth an instance commits no KV memory ahead of its use: end what takes it, or raise the limit."
        )
        yield warning("memory", text, advice)
    else:
        yield ok("memory", text)


def look_at_files(limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """Examine the limit on open files, and so on a router's connections.

    ``limits`` are soft and hard; by default, this process's.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    options = WorkerOptions()
    wanted = FILES_A_REQUEST * (options.max_running_requests + options.max_queued_requests)
    says = {limit: str(limit) for limit in (soft, hard)} | {resource.RLIM_INFINITY: "no limit"}
    text = says[soft] if soft == hard else f"{says[soft]}, which pdserve raises to {says[hard]}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield warning(
            "open files",
            text,
            f"A router in front of one full instance needs {wanted}: raise the hard limit (ulimit -Hn, systemd's "
            "LimitNOFILE, docker run --ulimit nofile=…).",
        )
    else:
        yield ok("open files", text)


def look_at_run_dir(folder: Path | None = None) -> Iterator[Finding]:
    """Examine the folder that would hold an instance's sockets: is it writable, its path short enough, and not full?

    ``folder``: None for the one that a server started now would use.
    """
    advice = "Point TMPDIR to a short path on a local disk that can be written to."
    try:
        # Python finds the first folder that can be written to.
        place = folder or run_dir_parent()
        with tempfile.TemporaryDirectory(dir=place):
            free = os.statvfs(place)
    except OSError as e:
        yield problem("sockets", f"no folder for temporary files: {e}", advice)
        return
    longest = SOCKET_PATH_CHARS - RUN_DIR_CHARS
    if len(str(place)) > longest:
        yield problem("sockets", f"{place} is longer than {longest} characters: Unix sockets don't fit", advice)
        return
    if free.f_bavail * free.f_frsize < LEAST_FREE:
        yield problem("sockets", f"{place} is full", advice)
    else:
        yield ok("sockets", f"in {place}, which can be written to")


def look_at_shared_memory() -> Iterator[Finding]:
    """Check that the shm transfer backend can get memory. It is a memfd, so the size of /dev/shm does not matter."""
    try:
        region = allocate_region(os.sysconf("SC_PAGE_SIZE"), shared=True)
    except RegionError as e:
        yield warning("shared memory", str(e), "Use --disaggregation-transfer-backend tcp.")
        return
    region.view()[:1] = b"\1"
    region.close()
    yield ok("shared memory", "KV pools can be shared (memfd, not limited by the size of /dev/shm)")
