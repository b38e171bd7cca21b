"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...model_files.spec import AttentionSpec, MLASpec
from ..device.base import Device
from ..kv.pool import KVPool
from ..kv.sparse.pool import SparseTokenToKVPool
from ..options import WorkerOptions
from .base import AttentionBackend, AttentionLimits


class BackendNeeds(NamedTuple):
    """What backends are made of. ``pools``: of each page group. ``dtype``: of queries.

    Triton needs ``limits``, too. FlashInfer needs the ``device``, ``attentions`` of every layer, ``workspace_mib``, and
    ``most_pages`` that the entries of a captured pass can have together. A pool with labels needs the ``options`` by
    which tokens are chosen.
    """

    pools: Sequence[KVPool]
    dtype: torch.dtype
    limits: AttentionLimits | None = None
    device: Device | None = None
    attentions: Sequence[AttentionSpec | MLASpec] = ()
    most_pages: int = 0
    workspace_mib: int = 0
    options: WorkerOptions | None = None


def make_attention_backend(name: str, needs: BackendNeeds) -> AttentionBackend:
    """Make the attention backend of the name ``name`` from what it ``needs``.

    "torch" over a pool with labels is double sparsity. Raises ``ValueError`` for unknown names.
    """
    pool = needs.pools[0]
    if name == "torch" and isinstance(pool, SparseTokenToKVPool) and needs.options is not None:
        from .sparse.attention import DoubleSparsityAttention

        tokens, threshold = needs.options.ds_heavy_token_num, needs.options.ds_sparse_decode_threshold
        return DoubleSparsityAttention(pool, needs.dtype, tokens, threshold)
    if name == "torch":
        from .torch_backend import TorchAttention

        return TorchAttention(needs.pools, needs.dtype)
    if name == "triton" and needs.limits is not None:
        from .triton.backend import TritonAttention

        return TritonAttention(needs.pools, needs.dtype, needs.limits)
    if name == "flashinfer" and needs.device is not None:
        from .flashinfer.backend import FlashInferAttention

        return FlashInferAttention(
            needs.pools,
            needs.dtype,
            needs.attentions,
            needs.device,
            needs.workspace_mib,
            needs.most_pages,
        )
    raise ValueError(f"there is no attention backend {name!r}; there are torch, triton and flashinfer")
