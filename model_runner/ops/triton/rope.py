"""Rotary embedding in place, of queries and keys in one launch, after the norms of their heads if there are any.

Models are loaded so that pair ``i`` of a head lies at ``i`` and ``head_dim / 2 + i`` (``model_files/rope_order.py``),
elements that do not turn included: they have the angle 0. For heads in a checkpoint's own order, neighbours form the
pairs, and elements after the rotated ones stay as they are.

Shapes: T tokens, H heads of D, C rows of the table, r rotated elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....model_files.spec import NormSpec, Pairing


def rope_table(inv_freq: Tensor, scale: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the table [C, r] float32 that ``rotate`` takes: cosines, then sines, of ``positions`` ([C]), by pair.

    ``inv_freq`` (radians per token) and ``scale`` (a factor of both): [r / 2] float32. The table may cover all
    positions of a context once, or a pass's tokens each time. ``out``: memory for it, or None.
    """
    half = len(inv_freq)
    out = torch.empty((len(positions), 2 * half), dtype=torch.float32, device=inv_freq.device) if out is None else out
    angles = positions.to(torch.float32)[:, None] * inv_freq
    torch.cos(angles, out=out[:, :half]).mul_(scale)
    torch.sin(angles, out=out[:, half:]).mul_(scale)
    return out


def rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor | None = None,
    *,
    pairing: Pairing = Pairing.HALVES,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    spec: NormSpec | None = None,
) -> None:
    """Queue the rotation of ``q`` [T, H, D] and ``k`` [T, H', D] in place; elements of a head lie side by side.

    Token ``t`` turns by row ``positions[t]`` ([T] int64) of ``table`` ([C, r] float32), or by row ``t`` if there are no
    positions. ``pairing``: which elements of a head rotate together. ``q_weight``, ``k_weight``, ``spec``: each head is
    normalised first, with these weights ([D] float32).
    """
    tokens, heads, width = q.shape
    if not tokens:
        return
    is_normed = q_weight is not None
    spec = spec or NormSpec(eps=0.0)
    _rotate[(tokens, heads + k.shape[1])](
        q,
        k,
        table,
        positions,
        q_weight,
        k_weight,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        heads,
        spec.eps,
        spec.offset,
        DIM=width,
        ROTATED=table.shape[1],
        NEIGHBOURS=pairing is Pairing.NEIGHBOURS,
        NORM=is_normed,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def _rotate(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    heads: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_key = head >= heads
    x_ptr = tl.where(is_key, k_ptr + token * k_token + (head - heads) * k_head, q_ptr + token * q_token + head * q_head)
    row = token if positions_ptr is None else tl.load(positions_ptr + token)
    # The partner of each element is read a second time: that is cheaper than to move it between threads.
    at = tl.arange(0, BLOCK)
    is_in, is_turned = at < DIM, at < ROTATED
    half: tl.constexpr = ROTATED // 2
    if NEIGHBOURS:
        pair, partner, is_second = at // 2, at ^ 1, at % 2 == 1
    else:
        pair, partner, is_second = at % half, (at + half) % ROTATED, at >= half
    cos = tl.load(table_ptr + row * ROTATED + pair, mask=is_turned, other=1.0)
    sin = tl.load(table_ptr + row * ROTATED + half + pair, mask=is_turned, other=0.0)
    x = tl.load(x_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=is_turned, other=0.0).to(tl.float32)
    if NORM:
        weight_ptr = tl.where(is_key, k_weight_ptr, q_weight_ptr)
        factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps)
        # Rounded here, as where norm and rotation are separate.
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        x = (x * factor * (tl.load(weight_ptr + at, mask=is_in, other=0.0) + offset)).to(dtype).to(tl.float32)
        other_weight = tl.load(weight_ptr + partner, mask=is_turned, other=0.0) + offset
        other = (other * factor * other_weight).to(dtype).to(tl.float32)
    turned = x * cos + tl.where(is_second, other, -other) * sin
    tl.debug_barrier()  # every thread has read what the others are about to write
    tl.store(x_ptr + at, turned.to(q_ptr.dtype.element_ty), mask=is_turned if not NORM else is_in)
