"""A KV pool as kernels address it: by the strides of the order "tokens", one layer at a time.

A slot's head begins at ``page * page_stride + offset * token_stride + head * head_stride`` elements behind a layer's
first key (or value, of the same place); page and offset are ``divmod(slot, page_size)``. Offsets are int64: a pool is
larger than what 32 bits count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...dtypes import SCALE_BYTES
from ...kv.pool import KEYS, VALUES, KVPool
from ...kv.triton.elements import KINDS


@dataclass(frozen=True)
class LayerViews:
    """One layer of a pool. ``kind``: see ``kv/triton/elements.py``. ``head_dim``: elements of a row, scale excluded.

    ``value_dim``: of those, the elements of a value. The tensors are views: those of keys and values are what kernels
    take as pointers, and so are scales, the same bytes as float32. What there is not is the keys' once more.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    kind: str
    page_size: int
    page_stride: int
    token_stride: int
    head_stride: int
    heads: int
    head_dim: int
    value_dim: int
    is_latent: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and their scales, in the order in which kernels take them."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def strides(self) -> dict[str, int]:
        """Page size and strides in elements, by the names of the kernels' arguments."""
        return {
            "PAGE_SIZE": self.page_size,
            "PAGE_STRIDE": self.page_stride,
            "TOKEN_STRIDE": self.token_stride,
            "HEAD_STRIDE": self.head_stride,
        }


def layer_views(pool: KVPool) -> dict[int, LayerViews]:
    """Return the views of all layers of ``pool``, by the layer's number in the model.

    Raises ``ValueError`` if the kernels can't address the pool.
    """
    layout, group = pool.layout, pool.group
    if layout.order != "tokens":
        raise ValueError(f"Triton's kernels read KV in token order, not in {layout.order!r}")
    if pool.is_quantized and group.head_dim % SCALE_BYTES:
        raise ValueError(f"a quantised head of {group.head_dim} elements puts its scale where no kernel can load it")
    is_latent = group.kind == "mla"
    begin, end = pool.heads
    # [P, L, 2, page_size, H, W], or [P, L, 1, page_size, 1, W] of latent rows.
    data = pool.data[:, :, None, :, None] if is_latent else pool.data[..., begin:end, :]
    scales = data.view(torch.float32) if pool.is_quantized else None
    page_stride, _, _, token_stride, head_stride, _ = data.stride()

    def views(index: int) -> LayerViews:
        keys = data[:, index, KEYS]
        values = keys if is_latent else data[:, index, VALUES]
        return LayerViews(
            keys=keys,
            values=values,
            key_scales=keys if scales is None else scales[:, index, KEYS],
            value_scales=keys if scales is None else scales[:, index, VALUES],
            kind=KINDS[pool.dtype] if pool.is_quantized else "",
            page_size=layout.page_size,
            page_stride=page_stride,
            token_stride=token_stride,
            head_stride=head_stride,
            heads=end - begin,
            head_dim=group.head_dim,
            value_dim=group.value_dim if is_latent else group.head_dim,
            is_latent=is_latent,
        )

    return {layer: views(index) for index, layer in enumerate(group.layers)}
