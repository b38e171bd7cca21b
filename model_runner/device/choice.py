"""Chooses the device, and the types that it computes in. Imports torch only where a GPU may be meant."""

from __future__ import annotations

from typing import Literal

from ...model_files.errors import UnsupportedModel
from ...runtime.machine.gpus import may_use_gpu
from .base import Device
from .cpu import CpuDevice

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDTypeName = Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
KV_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""KV types with names of our own, and torch's names for them."""


def choose_device(name: Literal["auto", "cpu", "cuda"], number: int = 0) -> str:
    """Return the device that ``name`` means, as torch names it: "cpu", or of GPUs the one with this number.

    Raises ``UnsupportedModel`` if it is not there.
    """
    if not may_use_gpu(name):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        if name == "cuda":
            raise UnsupportedModel("--device cuda: torch sees no CUDA device here; use --device cpu")
        return "cpu"
    count = torch.cuda.device_count()
    if number >= count:
        raise UnsupportedModel(
            f"GPU {number} is asked for (--base-gpu-id, and one for each rank from there on), and torch sees {count} "
            "here (CUDA_VISIBLE_DEVICES)"
        )
    return f"cuda:{number}"


def choose_dtype(name: DTypeName, device_kind: str) -> str:
    """Return the type of weights and activations: bfloat16 unless ``name`` says otherwise or a GPU lacks it.

    Processors without products of bfloat16 store it all the same, half the bytes of float32, and widen it as they
    multiply. So hosts of any kind can hand over to each other.
    """
    if name != "auto":
        return name
    if device_kind == "cuda":
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16"


def choose_kv_dtype(name: KVDTypeName, dtype: str) -> str:
    """Return the type of the KV pool's elements, beside weights of ``dtype``."""
    return dtype if name == "auto" else KV_DTYPES.get(name, name)


def open_device(place: str, *, strict: bool = False) -> Device:
    """Return what runs work on the device that torch calls ``place``. ``strict``: see ``CudaDevice``."""
    if place == "cpu":
        return CpuDevice()
    from .cuda import CudaDevice

    return CudaDevice(place, strict=strict)
