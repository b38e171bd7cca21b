"""Chooses the device, and the types that it computes in."""

from __future__ import annotations

from typing import Literal

import torch

from ...model_files.errors import UnsupportedModel
from .base import Device
from .cpu import CpuDevice
from .cuda import CudaDevice

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDTypeName = Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""KV types with a name that is not torch's own, or that weights can't have."""


def choose_device(name: Literal["auto", "cpu", "cuda"], number: int = 0) -> torch.device:
    """The device that ``name`` means, of GPUs the one with this number; raises ``UnsupportedModel`` where it is not
    there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda: torch sees no CUDA device here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if number >= count:
        raise UnsupportedModel(
            f"GPU {number} is asked for (--base-gpu-id, and one for each rank from there on), and torch sees {count} "
            "here (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", number)


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


def choose_kv_dtype(name: KVDTypeName, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV pool's elements, beside weights of ``dtype``."""
    if name == "auto":
        return dtype
    chosen: torch.dtype = KV_DTYPES[name] if name in KV_DTYPES else getattr(torch, name)
    return chosen


def open_device(device: torch.device, *, strict: bool = False) -> Device:
    """What runs work on ``device``. ``strict``: see ``CudaDevice``."""
    if device.type == "cuda":
        return CudaDevice(device, strict=strict)
    return CpuDevice()
