"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import logging

import torch

from ...model_files.errors import UnsupportedModel
from ...model_files.spec import ModelSpec
from ...runtime.options import ServerOptions
from ..double_sparsity.pool import SparseTokenToKVPool
from ..kv_pool import KVPool
from .base import AttentionBackend

log = logging.getLogger(__name__)


def choose_attention_backend(
    name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str:
    """What ``name`` stands for: "auto" is "cpu", the whole engine of ``kernels``, wherever that runs, else "torch".

    Raises ``UnsupportedModel`` where "cpu" is asked for by name and can't be had.
    """
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


def make_attention_backend(
    name: str,
    pool: KVPool,
    dtype: torch.dtype,
    window_pool: KVPool | None = None,
    options: ServerOptions | None = None,
) -> AttentionBackend:
    """The backend ``name`` over ``pool``, and over ``window_pool`` for the layers that this has; ``dtype`` is that of
    the queries. ``options``: what to choose tokens by, needed where the pool has labels. Raises ``ValueError`` for
    unknown names.
    """
    if name == "torch" and isinstance(pool, SparseTokenToKVPool) and options is not None:
        from ..double_sparsity.attention import DoubleSparsityAttention

        return DoubleSparsityAttention(pool, dtype, options.ds_heavy_token_num, options.ds_sparse_decode_threshold)
    if name == "torch":
        from .torch_backend import TorchAttention

        return TorchAttention(pool, dtype, window_pool)
    raise ValueError(f"there is no attention backend {name!r}; there is torch")
