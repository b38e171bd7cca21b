"""Keys and values of a pass, written to their slots, and quantised if the pool is.

One program a token: it reads the token's heads, [H, D] of keys and of values. It writes each as one run of the page,
``[page, layer, k/v, offset, head, dim]``. Memory-bound and small beside the attention that reads it: nothing is tuned.

Shapes: T tokens, H KV heads, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...kv.triton.elements import quantize_rows
from .pool_views import LayerViews


@triton.jit
def store_kv_rows(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    KIND: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_VALUES: tl.constexpr,
) -> None:
    """Write the keys and values of token ``program_id(0)`` to its slot, quantised if KIND names a quantised type.

    ``slots``: slot of each token in the pool. ``k_scales``, ``v_scales``: where the scales of quantised heads go.
    Without ``HAS_VALUES`` the keys are latent rows, and ``v`` is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    base = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * TOKEN_STRIDE
    heads = tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    mask = (heads < HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    rows = base + heads * HEAD_STRIDE
    x = tl.load(k + token * k_token_stride + heads[:, None] * k_head_stride + columns[None, :], mask=mask, other=0.0)
    _write(x, rows, columns, heads < HEADS, mask, k_pool, k_scales, KIND, HEAD_DIM)
    if HAS_VALUES:
        y = tl.load(
            v + token * v_token_stride + heads[:, None] * v_head_stride + columns[None, :], mask=mask, other=0.0
        )
        _write(y, rows, columns, heads < HEADS, mask, v_pool, v_scales, KIND, HEAD_DIM)


@triton.jit
def _write(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_head: tl.tensor,
    mask: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    where = pool + rows[:, None] + columns[None, :]
    if KIND == "":
        tl.store(where, x.to(pool.dtype.element_ty), mask=mask)
    else:
        elements, found = quantize_rows(x.to(tl.float32), KIND)
        tl.store(where, elements, mask=mask)
        tl.store(scales + ((rows + HEAD_DIM) >> 2), found, mask=is_head)


def store_kv(k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, pool: LayerViews) -> None:
    """Queue the write of ``k_THD`` and ``v_THD`` to ``slots_T`` (int64) of one layer of the pool.

    With latent rows ``v_THD`` is not read: it is part of ``k_THD``.
    """
    k, v = _rows(k_THD), _rows(v_THD)
    store_kv_rows[(len(slots_T),)](
        k,
        v,
        slots_T,
        *pool.tensors,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        KIND=pool.kind,
        **pool.strides,
        HEADS=pool.heads,
        HEAD_DIM=pool.head_dim,
        BLOCK_H=triton.next_power_of_2(pool.heads),
        BLOCK_D=triton.next_power_of_2(pool.head_dim),
        HAS_VALUES=not pool.is_latent,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
