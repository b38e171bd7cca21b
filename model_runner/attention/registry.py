"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...model_files.errors import UnsupportedModel
from ...model_files.spec import AttentionSpec, MLASpec, ModelSpec
from ...runtime.options import ServerOptions
from ..device.base import Device
from ..kv.pool import KVPool
from ..kv.sparse.pool import SparseTokenToKVPool
from .base import AttentionBackend, AttentionLimits

log = logging.getLogger(__name__)


def choose_attention_backend(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str:
    """What ``name`` stands for: "auto" is "cpu", the whole engine of ``kernels``, wherever that runs; on a GPU
    "flashinfer" where it is installed and serves the model, else "triton"; and last "torch".

    Raises ``UnsupportedModel`` where one is asked for by name and can't be had.
    """
    if name == "torch":
        return name
    if device.type == "cpu" and name == "auto":
        reason = _refusal(spec, device, dtype, kv_dtype)
        if reason is None:
            return "cpu"
        log.warning("running on the torch reference, several times slower than the CPU kernels: %s", reason)
        return "torch"
    if name == "auto":
        for candidate in ("flashinfer", "triton"):
            reason = _why_not(candidate, spec, device, dtype, kv_dtype)
            if reason is None:
                return candidate
            log.info("attention backend %s: %s", candidate, reason)
        log.warning("attention runs on the torch reference, which is slow and waits for the GPU in every step")
        return "torch"
    reason = _why_not(name, spec, device, dtype, kv_dtype)
    if reason is not None:
        raise UnsupportedModel(f"--attention-backend {name}: {reason}")
    return name


def _why_not(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    if name == "cpu":
        return _refusal(spec, device, dtype, kv_dtype)
    if name == "flashinfer":
        from .flashinfer.support import missing, unsupported

        if device.type != "cuda":
            return f"FlashInfer runs on NVIDIA GPUs, not on {device.type}"
        return missing() or unsupported([layer.attention for layer in spec.layers], dtype, kv_dtype)
    return triton_refusal(device)


def _refusal(spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the CPU kernels can't be used, or None. Builds them, if nobody has."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device.type}"
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


def triton_refusal(device: torch.device) -> str | None:
    """Why Triton's kernels can't be used, or None."""
    try:
        from .triton.backend import refusal
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] != "triton":
            raise
        return "Triton is not installed here; pip install 'pdserve[triton]'"
    return refusal(device)


class BackendNeeds(NamedTuple):
    """What backends are made of. ``dtype``: of queries. Triton needs ``limits``, too; FlashInfer the
    ``device``, the ``attentions`` of every layer, ``most_pages`` that the entries of a captured pass can have together,
    and ``workspace_mib``; a pool with labels the ``options`` by which tokens are chosen.
    """

    pool: KVPool
    dtype: torch.dtype
    window_pool: KVPool | None = None
    limits: AttentionLimits | None = None
    device: Device | None = None
    attentions: Sequence[AttentionSpec | MLASpec] = ()
    most_pages: int = 0
    workspace_mib: int = 0
    options: ServerOptions | None = None


def make_attention_backend(name: str, needs: BackendNeeds) -> AttentionBackend:
    """The backend ``name`` over the pool, and over the window pool for the layers that this has. Raises ``ValueError``
    for unknown names.
    """
    if name == "torch" and isinstance(needs.pool, SparseTokenToKVPool) and needs.options is not None:
        from .sparse.attention import DoubleSparsityAttention

        tokens, threshold = needs.options.ds_heavy_token_num, needs.options.ds_sparse_decode_threshold
        return DoubleSparsityAttention(needs.pool, needs.dtype, tokens, threshold)
    if name == "torch":
        from .torch_backend import TorchAttention

        return TorchAttention(needs.pool, needs.dtype, needs.window_pool)
    if name == "triton" and needs.limits is not None:
        from .triton.backend import TritonAttention

        return TritonAttention(needs.pool, needs.dtype, needs.window_pool, needs.limits)
    if name == "flashinfer" and needs.device is not None:
        from .flashinfer.backend import FlashInferAttention

        return FlashInferAttention(
            needs.pool,
            needs.dtype,
            needs.window_pool,
            needs.attentions,
            needs.device,
            needs.workspace_mib,
            needs.most_pages,
        )
    raise ValueError(f"there is no attention backend {name!r}; there are torch, triton and flashinfer")
