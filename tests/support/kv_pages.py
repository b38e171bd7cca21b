"""Pools of KV in either order, for tests."""

from __future__ import annotations

import msgspec
import torch

from pdserve.disaggregation.transfer.page_order import PageConverter
from pdserve.messages.worker import KVLayout, KVOrder
from pdserve.model_runner.kv_pool import KVPool, make_pool

from .layouts import latent_layout, uniform_layout


def make_pool_layout(
    page_size: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, order: KVOrder = "tokens"
) -> KVLayout:
    """A layout whose ``page_bytes`` are right."""
    nbytes = layers * 2 * page_size * kv_heads * dim * dtype.itemsize
    return uniform_layout(page_size, layers, kv_heads, dim, str(dtype).removeprefix("torch."), nbytes, order)


def make_latent_layout(
    page_size: int, layers: int, dim: int, value_dim: int, dtype: torch.dtype, order: KVOrder = "tokens"
) -> KVLayout:
    """The same of latent rows."""
    nbytes = layers * page_size * dim * dtype.itemsize
    return latent_layout(page_size, layers, dim, str(dtype).removeprefix("torch."), nbytes, order, value_dim)


def in_order(pool: KVPool, order: KVOrder) -> KVPool:
    """A copy of the pool whose pages lie in ``order``."""
    layout = msgspec.structs.replace(pool.layout, order=order)
    twin = make_pool(layout, len(pool.data), torch.device("cpu"))
    pages = twin.data.view(torch.uint8).view(len(pool.data), -1)
    pages.copy_(pool.data.view(torch.uint8).view(pages.shape))
    converter = PageConverter(layout, pool.layout.order)
    for page in pages.numpy():
        converter.convert(page)
    return twin
