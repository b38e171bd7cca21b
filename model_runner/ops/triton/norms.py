"""Root-mean-square norms, alone or with the sum they follow: a program a row, float32 within, rounded once at the end.

A layer's ``x += scale · after(y); y' = before(x)`` (``model_files/spec.py``) is one pass over the row instead of four.

Shapes: T tokens, N elements of a row, H heads of D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....model_files.spec import NormSpec

_WIDEST = 1 << 14
"""Elements of a row that a program holds."""
_WIDEST_AFTER = 1 << 13
"""Elements of a row that a program with two norms holds: with more, its registers spill."""


def rms_norm(x: Tensor, weight: Tensor, spec: NormSpec, out: Tensor | None = None) -> Tensor:
    """Return ``x`` [T, N] normalised, times ``weight`` ([N] float32) plus the spec's offset.

    ``out``: memory for it, which may be ``x``, or None. Rows may lie apart; their elements lie side by side. Raises
    ``ValueError`` for too wide rows.
    """
    out = torch.empty_like(x) if out is None else out
    rows, width = x.shape
    block = _block(width)
    if rows:
        strides = (x.stride(0), 0, out.stride(0), 0)
        grid = (rows, 1)
        _norm_rows[grid](x, weight, out, *strides, spec.eps, spec.offset, width, BLOCK=block, num_warps=_warps(block))
    return out


def head_norm(x: Tensor, weight: Tensor, spec: NormSpec, out: Tensor | None = None) -> Tensor:
    """Return ``x`` [T, H, D] with each head normalised by itself; write it to ``out`` if given.

    ``weight`` ([D] float32) is that of all heads. Raises ``ValueError`` for too wide heads.
    """
    out = torch.empty_like(x) if out is None else out
    tokens, heads, width = x.shape
    if tokens:
        strides = (x.stride(0), x.stride(1), out.stride(0), out.stride(1))
        grid = (tokens, heads)
        sizes = (spec.eps, spec.offset, width)
        _norm_rows[grid](x, weight, out, *strides, *sizes, BLOCK=_block(width), num_warps=1)
    return out


def add_and_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    spec: NormSpec | None,
    out: Tensor | None = None,
    *,
    scale: float = 1.0,
    after_weight: Tensor | None = None,
    after_spec: NormSpec | None = None,
) -> Tensor:
    """Add ``scale`` times ``y`` to the residual ``x`` [T, N], in place, and return the sum normalised.

    ``weight``, ``spec``: norm of the sum; without them the result is the sum itself. ``after_weight``, ``after_spec``:
    norm of ``y`` before it is added, if given. Weights are [N] float32. ``out``: memory for the result; None: allocate
    it. The sum is rounded to the type of ``x`` before it is normalised, as by separate kernels. Raises ``ValueError``
    for too wide rows.
    """
    rows, width = x.shape
    out = torch.empty_like(x) if out is None else out
    block = _block(width)
    if after_weight is not None and after_spec is not None and block > _WIDEST_AFTER:
        y, after_weight = rms_norm(y, after_weight, after_spec, out), None
    spec, is_normed = spec or NormSpec(eps=0.0), weight is not None
    after, is_after = after_spec or NormSpec(eps=0.0), after_weight is not None
    if rows:
        strides = (x.stride(0), y.stride(0), out.stride(0))
        numbers = (spec.eps, spec.offset, after.eps, after.offset, scale, width)
        flags = {"NORM": is_normed, "AFTER": is_after, "BLOCK": block, "num_warps": _warps(block)}
        _add_and_norm[(rows,)](x, y, weight, after_weight, out, *strides, *numbers, **flags)
    return out


def _block(width: int) -> int:
    if width > _WIDEST:
        raise ValueError(f"a row of {width} elements is more than a norm's program holds, {_WIDEST}")
    return 1 << (width - 1).bit_length()


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 32)


@triton.jit
def _normed(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, offset: tl.tensor, width: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Return one row ``x`` divided by its root mean square, times ``weight + offset``, rounded to ``dtype``.

    ``width``: elements of the row. ``x`` may be padded beyond them, by zeros.
    """
    mean = tl.sum(x * x, 0) / width
    return (x * (1.0 / tl.sqrt_rn(mean + eps)) * (weight + offset)).to(dtype)


@triton.jit
def _norm_rows(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_in = at < width
    x = tl.load(x_ptr + token * x_token + head * x_head + at, mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0)
    normed = _normed(x, weight, eps, offset, width, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_token + head * out_head + at, normed, mask=is_in)


@triton.jit
def _add_and_norm(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    after_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token: tl.tensor,
    y_token: tl.tensor,
    out_token: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    after_eps: tl.tensor,
    after_offset: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    NORM: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    y = tl.load(y_ptr + token * y_token + at, mask=is_in, other=0.0).to(tl.float32)
    if AFTER:
        after_weight = tl.load(after_weight_ptr + at, mask=is_in, other=0.0)
        y = _normed(y, after_weight, after_eps, after_offset, width, dtype).to(tl.float32)
    x = tl.load(x_ptr + token * x_token + at, mask=is_in, other=0.0).to(tl.float32)
    x = (x + scale * y).to(dtype)
    tl.store(x_ptr + token * x_token + at, x, mask=is_in)
    if NORM:
        weight = tl.load(weight_ptr + at, mask=is_in, other=0.0)
        normed = _normed(x.to(tl.float32), weight, eps, offset, width, dtype)
        tl.store(out_ptr + token * out_token + at, normed, mask=is_in)
    else:
        tl.store(out_ptr + token * out_token + at, x, mask=is_in)
