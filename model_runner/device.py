"""What the device is, which type it computes in, and how much memory it has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ..model_files.errors import UnsupportedModel

log = logging.getLogger(__name__)
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
UNLIMITED = 1 << 60


class Memory(NamedTuple):
    """Memory of a device, in bytes; ``free`` is what can still be taken without pushing anyone out."""

    total: int
    free: int


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that ``name`` means; raises ``UnsupportedModel`` where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """The type of weights and activations: bfloat16 unless told otherwise, but for GPUs that don't compute in it.

    Processors without products of bfloat16 store it all the same, half the bytes of float32, and widen it as they
    multiply; and hosts of any kind can hand over to each other.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The processor's feature flags (x86 "flags", Arm "Features"); empty where the system does not tell."""
    if not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def device_memory(device: torch.device) -> Memory:
    """Memory of ``device``; on the CPU within the control group that this process runs in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    return host_memory(Path("/proc"), Path("/sys/fs/cgroup"))


def host_memory(proc: Path, cgroup_root: Path) -> Memory:
    """Memory of the host, or of the tightest of the control groups around this process."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {fields[0].rstrip(":"): int(fields[1]) for fields in lines}
    memory = Memory(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)
    for limit, used in _group_limits(proc / "self/cgroup", cgroup_root):
        if limit < memory.total:
            memory = Memory(limit, memory.free)
        memory = memory._replace(free=max(0, min(memory.free, limit - used)))
    return memory


def _group_limits(membership: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, bytes in use) of this process's control group and each one around it, versions 1 and 2."""
    if not membership.is_file():
        return []
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, used_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # A container sees its own group as the root, while the path still names it from the host's.
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (folder / limit_file).is_file():
                limit = _read_bytes(folder / limit_file)
                if limit < UNLIMITED:
                    limits.append((limit, _read_bytes(folder / used_file) - _reclaimable(folder)))
    return limits


def _read_bytes(file: Path) -> int:
    text = file.read_text().strip()
    return UNLIMITED if text == "max" else int(text)


def _reclaimable(group: Path) -> int:
    """File cache that the kernel drops before it refuses memory: counted as used, but free for the taking."""
    stat = group / "memory.stat"
    if not stat.is_file():
        return 0
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
