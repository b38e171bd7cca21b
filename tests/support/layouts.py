"""KV layouts for tests."""

from __future__ import annotations

from pdserve.messages.worker import KVGroup, KVLayout, KVOrder


def uniform_layout(
    page_size: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    page_bytes: int,
    order: KVOrder = "tokens",
    window: int = 0,
) -> KVLayout:
    """Make a layout with all layers alike, in one group of pages. A ``window`` adds as many layers with that window."""
    group = KVGroup(tuple(range(num_layers)), "mha", kv_heads, head_dim, dtype, page_bytes)
    if not window:
        return KVLayout(page_size, (group,), order)
    layers = tuple(range(num_layers, 2 * num_layers))
    apart = KVGroup(layers, "mha", kv_heads, head_dim, dtype, page_bytes, window=window)
    return KVLayout(page_size, (group, apart), order)


def latent_layout(
    page_size: int,
    num_layers: int,
    dim: int,
    dtype: str,
    page_bytes: int,
    order: KVOrder = "tokens",
    value_dim: int = 0,
) -> KVLayout:
    """Make a layout with rows of latent attention in all layers."""
    group = KVGroup(tuple(range(num_layers)), "mla", 1, dim, dtype, page_bytes, value_dim)
    return KVLayout(page_size, (group,), order)
