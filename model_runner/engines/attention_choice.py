"""Chooses the attention backend, and with it the engine: "cpu" stands for the C++ engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...model_files.errors import UnsupportedModel
from ...model_files.spec import ModelSpec
from ..dtypes import DType, dtype_name

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def choose_attention_backend(
    name: str, spec: ModelSpec, device: str | torch.device, dtype: DType, kv_dtype: DType
) -> str:
    """Return the attention backend that ``name`` (``--attention-backend``) stands for on ``device``.

    "auto" is "cpu", the C++ engine, wherever it runs. On a GPU it is "flashinfer" if that is installed and serves the
    model, else "triton"; and last "torch". Raises ``UnsupportedModel`` for a backend that cannot run here.
    """
    if name == "torch":
        return name
    place = str(device)
    if place == "cpu" and name == "auto":
        reason = _refusal(spec, place, dtype, kv_dtype)
        if reason is None:
            return "cpu"
        log.warning("running on the torch reference, several times slower than the CPU kernels: %s", reason)
        return "torch"
    if name == "auto":
        for candidate in ("flashinfer", "triton"):
            reason = _why_not(candidate, spec, place, dtype, kv_dtype)
            if reason is None:
                return candidate
            log.info("attention backend %s: %s", candidate, reason)
        log.warning("attention runs on the torch reference, which is slow and waits for the GPU in every step")
        return "torch"
    reason = _why_not(name, spec, place, dtype, kv_dtype)
    if reason is not None:
        raise UnsupportedModel(f"--attention-backend {name}: {reason}")
    return name


def _why_not(name: str, spec: ModelSpec, place: str, dtype: DType, kv_dtype: DType) -> str | None:
    if name == "cpu":
        return _refusal(spec, place, dtype, kv_dtype)
    # Imported here: the C++ engine does without torch.
    import torch

    device = torch.device(place)
    if name == "flashinfer":
        from ..attention.flashinfer.support import missing, unsupported

        if device.type != "cuda":
            return f"FlashInfer runs on NVIDIA GPUs, not on {device.type}"
        types = (getattr(torch, dtype_name(each)) for each in (dtype, kv_dtype))
        return missing() or unsupported([layer.attention for layer in spec.layers], *types)
    from ..device.triton_support import triton_refusal

    return triton_refusal(device)


def _refusal(spec: ModelSpec, place: str, dtype: DType, kv_dtype: DType) -> str | None:
    """Return why the CPU kernels can't compute ``spec`` on the device ``place``, or None if they can.

    Builds the kernels if they are not built.
    """
    if place != "cpu":
        return f"the CPU kernels do not run on {place.partition(':')[0]}"
    from ..cpu_engine.build import BuildError
    from ..cpu_engine.library import load_library
    from ..cpu_engine.lowering import refusal

    reason = refusal(spec, dtype, kv_dtype)
    if reason is None:
        try:
            load_library()
        except BuildError as e:
            reason = str(e)
    return reason
