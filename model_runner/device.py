"""What the device is, which type it computes in, and how much memory it has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from ..model_files.errors import UnsupportedModel
from ..runtime.machine.memory import Memory, host_memory

log = logging.getLogger(__name__)
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that ``name`` means; raises ``UnsupportedModel`` where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """The type of weights and activations: bfloat16 where the device multiplies in it, unless told otherwise."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_flags() & BF16_FLAGS else torch.float32


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
    return host_memory()
