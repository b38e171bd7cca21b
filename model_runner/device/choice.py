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
    """Return the device that ``name`` means, as torch names it: "cpu", or "cuda:" and ``number``.

    "auto" means the GPU if there is one. Raises ``UnsupportedModel`` if the device is not there.
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
    """Return the name of the type of weights and activations: ``name``, or the device's default if it is "auto".

    The default is bfloat16, and float16 on GPUs without it. Processors that can't multiply bfloat16 store it all the
    same, and widen it to float32 as they multiply. So hosts of any kind can hand over to each other.
    """
    if name != "auto":
        return name
    if device_kind == "cuda":
        import torch

        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16"


def choose_kv_dtype(name: KVDTypeName, dtype: str) -> str:
    """Return torch's name for the type of the KV pool's elements; "auto" means ``dtype``, the type of the weights."""
    return dtype if name == "auto" else KV_DTYPES.get(name, name)


def open_device(place: str, *, strict: bool = False) -> Device:
    """Return the ``Device`` that torch calls ``place``.

    ``strict``: raise if the host waits for a GPU within ``no_sync``, instead of not checking.
    """
    if place == "cpu":
        return CpuDevice()
    from .cuda import CudaDevice

    return CudaDevice(place, strict=strict)
