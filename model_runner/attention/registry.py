"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import torch

from ..kv_pool import MHATokenToKVPool
from .base import AttentionBackend


def choose_attention_backend(name: str) -> str:
    """What "auto" stands for."""
    return "torch" if name == "auto" else name


def make_attention_backend(name: str, pool: MHATokenToKVPool, num_heads: int, dtype: torch.dtype) -> AttentionBackend:
    """The backend ``name`` over ``pool``; ``dtype`` is that of the queries. Raises ``ValueError`` for unknown names."""
    if name == "torch":
        from .torch_backend import TorchAttention

        return TorchAttention(pool, num_heads, dtype)
    raise ValueError(f"there is no attention backend {name!r}; there is torch")
