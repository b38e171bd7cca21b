"""Pools of KV in either order, for tests."""

from __future__ import annotations

import os

import msgspec
import torch

from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.messages.worker import KVLayout, KVOrder
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import KVPool, MHATokenToKVPool, make_pool
from pdserve.model_runner.kv.quantization import pack_heads

from .layouts import latent_layout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Where Triton cuts off what is too much for bfloat16; a GPU rounds."""


def make_pool_layout(
    page_size: int, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, order: KVOrder = "tokens"
) -> KVLayout:
    """Make a layout with the right ``page_bytes``."""
    return make_layout(KVShape(layers, kv_heads, dim), page_size, dtype, order)


def as_stored(x: torch.Tensor, pool: MHATokenToKVPool) -> torch.Tensor:
    """Heads ``x`` [..., D] as ``pool``, in token order, holds them."""
    if pool.is_quantized:
        return pack_heads(x, pool.dtype)
    if INTERPRETED and (x.dtype, pool.dtype) == (torch.float32, torch.bfloat16):
        x = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return x.to(pool.dtype)


def values_of(pool: MHATokenToKVPool, data: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values in a pool in token order (or in ``data`` of one), [P, L, 2, page_size, H, D] float64."""
    data = pool.data if data is None else data
    if not pool.is_quantized:
        return data.double()
    dim = pool.group.head_dim
    elements, scales = data[..., :dim].contiguous().view(pool.dtype), data[..., dim:].contiguous().view(torch.float32)
    return elements.double() * scales.double()


def make_latent_layout(
    page_size: int, layers: int, dim: int, value_dim: int, dtype: torch.dtype, order: KVOrder = "tokens"
) -> KVLayout:
    """Make a layout of latent rows."""
    nbytes = layers * page_size * dim * dtype.itemsize
    return latent_layout(page_size, layers, dim, str(dtype).removeprefix("torch."), nbytes, order, value_dim)


def in_order(pool: KVPool, order: KVOrder) -> KVPool:
    """Return a copy of the pool with its pages in ``order``."""
    layout = msgspec.structs.replace(pool.layout, order=order)
    twin = make_pool(layout, len(pool.data), torch.device("cpu"))
    pages = twin.data.view(torch.uint8).view(len(pool.data), -1)
    pages.copy_(pool.data.view(torch.uint8).view(pages.shape))
    converter = PageConverter(layout, pool.layout.order)
    for page in pages.numpy():
        converter.convert(page)
    return twin
