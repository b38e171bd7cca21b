"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import logging

import torch

from ...model_files.errors import UnsupportedModel
from ...model_files.spec import ModelSpec
from ..kv_pool import KVPool
from .base import AttentionBackend, AttentionLimits

log = logging.getLogger(__name__)


def choose_attention_backend(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str:
    """What ``name`` stands for: "auto" is "cpu", the whole engine of ``kernels``, wherever that runs, else "torch".

    Raises ``UnsupportedModel`` where "cpu" or "triton" is asked for by name and can't be had.
    """
    if name == "triton":
        reason = _triton_refusal(device)
        if reason is not None:
            raise UnsupportedModel(f"--attention-backend triton: {reason}")
    if name not in ("auto", "cpu"):
        return name
    reason = _refusal(spec, device, dtype, kv_dtype)
    if reason is None:
        return "cpu"
    if name == "cpu":
        raise UnsupportedModel(f"--attention-backend cpu: {reason}")
    if device.type == "cpu":
        log.warning("running on the torch reference, several times slower than the CPU kernels: %s", reason)
    return "torch"


def _refusal(spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the CPU kernels can't be used, or None. Builds them, if nobody has."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device.type}"
    from ..kernels.build import BuildError
    from ..kernels.library import load_library
    from ..kernels.lowering import refusal

    reason = refusal(spec, dtype, kv_dtype)
    if reason is None:
        try:
            load_library()
        except BuildError as e:
            reason = str(e)
    return reason


def _triton_refusal(device: torch.device) -> str | None:
    """Why Triton's kernels can't be used, or None."""
    try:
        from ..triton_kernels.backend import refusal
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] != "triton":
            raise
        return "Triton is not installed here; pip install 'pdserve[triton]'"
    return refusal(device)


def make_attention_backend(
    name: str,
    pool: KVPool,
    dtype: torch.dtype,
    window_pool: KVPool | None = None,
    limits: AttentionLimits | None = None,
) -> AttentionBackend:
    """The backend ``name`` over ``pool``, and over ``window_pool`` for the layers that this has; ``dtype`` is that of
    the queries. ``limits``: torch needs none. Raises ``ValueError`` for unknown names.
    """
    if name == "torch":
        from .torch_backend import TorchAttention

        return TorchAttention(pool, dtype, window_pool)
    if name == "triton":
        from ..triton_kernels.backend import TritonAttention

        if limits is None:
            raise ValueError("the attention backend 'triton' needs to know its limits")
        return TritonAttention(pool, dtype, window_pool, limits)
    raise ValueError(f"there is no attention backend {name!r}; there are torch and triton")
