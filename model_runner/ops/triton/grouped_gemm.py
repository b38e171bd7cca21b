"""Mixture of experts: the products of all experts of a layer in two launches, over pairs of a token and an expert.

    sort      pairs by expert, within an expert by number; each expert's fill up whole blocks of rows
    up        a block of pairs times its expert's gate and up projections, activated: [pairs, I]
    down      times its expert's down projection, times the pair's weight: [pairs, N] float32
    combine   a token's pairs, added up in float32 in the order of the experts' numbers, as ``models/experts.py`` does

Sums go along the inner dimension in blocks of one size, from 0 on, in float32. So a row's result does not depend on the
rows that share its block. It may depend on ``block_m``: the tensor cores' instructions for 64 rows and more add in
another way than those for fewer. ``BLOCK_M`` is what models use.

The number of blocks is known to the device alone: as many programs as there may be are launched, and the rest leave.

Shapes: T tokens, C experts of a token, P = T C pairs (pair ``p`` is of token ``p // C``), E experts, N hidden size, I
inner size, B blocks of M pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....model_files.spec import Activation
from .activations import gated, kind_of

BLOCK_M = 64
"""Rows of a block in every batch. Not measured on a GPU.

Full blocks of prompts keep the tensor cores busy. Blocks of decode steps are mostly empty and wait for the weights, not
for products.
"""
_SCAN = 1024
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs in the order in which they are computed. The arrays have fixed addresses and a fixed maximum of pairs."""

    counts: Tensor
    """[E] int32: pairs of each expert."""
    pairs: Tensor
    """[B * M] int32: pair numbers; P and more fill up an expert's last block."""
    experts: Tensor
    """[B] int32: each block's expert, -1 behind the last."""
    block_m: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts, as in ``models/experts.py``: gate rows above up rows. Biases in the weights' type."""

    gate_up: Tensor
    """[E, 2 I, N]"""
    down: Tensor
    """[E, N, I]"""
    gate_up_bias: Tensor | None = None
    """[E, 2 I]"""
    down_bias: Tensor | None = None
    """[E, N]"""


def make_blocks(pairs: int, experts: int, block_m: int, device: torch.device) -> ExpertBlocks:
    """Allocate the arrays of ``ExpertBlocks``, uninitialised, for up to ``pairs`` pairs of a token and an expert.

    ``experts``: number of experts. ``block_m``: pairs that a block takes, all of one expert.
    """
    most = pairs // block_m + min(pairs, experts)
    return ExpertBlocks(
        counts=torch.empty(experts, dtype=torch.int32, device=device),
        pairs=torch.empty(most * block_m, dtype=torch.int32, device=device),
        experts=torch.empty(most, dtype=torch.int32, device=device),
        block_m=block_m,
    )


def sort_pairs(chosen: Tensor, blocks: ExpertBlocks) -> None:
    """Queue the division of the pairs of ``chosen`` among the blocks, each block for one expert.

    ``chosen``: each token's experts, [T, C] int32 or int64, contiguous, each in 0 … E - 1.
    """
    size, experts = chosen.numel(), len(blocks.counts)
    blocks.experts.fill_(-1)
    if size:
        _count_pairs[(experts,)](chosen, blocks.counts, size, SCAN=_SCAN)
        _place_pairs[(experts,)](
            chosen,
            blocks.counts,
            blocks.pairs,
            blocks.experts,
            size,
            experts,
            M=blocks.block_m,
            EXPERTS=triton.next_power_of_2(experts),
            SCAN=_SCAN,
        )


def experts_up(
    x: Tensor,
    weights: ExpertWeights,
    blocks: ExpertBlocks,
    chosen: int,
    out: Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
    tile: dict[str, int] | None = None,
) -> None:
    """Queue the gate and up products of each pair and their activation: ``out`` [P, I] of ``x`` [T, N].

    Both are of the weights' type. ``chosen``: experts of a token (C). ``limit``: for GPT-OSS's clamped activation.
    ``tile`` replaces that of ``experts_tile``; its M is ``blocks.block_m``.
    """
    inner, hidden = weights.down.shape[2], weights.down.shape[1]
    if len(x) == 0:
        return
    tile = tile or experts_tile(blocks.block_m, x.dtype, halves=2)
    _experts_up[(len(blocks.experts), triton.cdiv(inner, tile["N"]))](
        x,
        weights.gate_up,
        weights.gate_up_bias,
        out,
        blocks.pairs,
        blocks.experts,
        x.stride(0),
        len(out),
        chosen,
        inner,
        hidden,
        limit or 0.0,
        KIND=kind_of(activation, limit),
        **tile,
    )


def experts_down(
    x: Tensor,
    weights: ExpertWeights,
    blocks: ExpertBlocks,
    pair_weights: Tensor,
    out: Tensor,
    tile: dict[str, int] | None = None,
) -> None:
    """Queue the down products of each pair, times its weight: ``out`` [P, N] float32 of ``x`` [P, I].

    ``pair_weights``: [P] float32. ``tile`` replaces that of ``experts_tile``.
    """
    hidden, inner = weights.down.shape[1:]
    if len(x) == 0:
        return
    tile = tile or experts_tile(blocks.block_m, x.dtype, halves=1)
    _experts_down[(len(blocks.experts), triton.cdiv(hidden, tile["N"]))](
        x,
        weights.down,
        weights.down_bias,
        out,
        blocks.pairs,
        blocks.experts,
        pair_weights,
        len(x),
        hidden,
        inner,
        **tile,
    )


def combine(pairs: Tensor, chosen: Tensor, out: Tensor, common: Tensor | None = None) -> None:
    """Queue the sum of each token's rows of ``pairs`` into ``out`` [T, N], in the order of their experts' numbers.

    ``pairs``: weighted outputs of all pairs of a token and an expert, [P, N] float32. ``chosen``: the experts' numbers,
    [T, C]. ``common``: output of the shared experts, [T, N], added last; None: there are none. The sum is rounded once.
    """
    tokens, hidden = out.shape
    count = chosen.shape[1]
    if tokens:
        _combine[(tokens, triton.cdiv(hidden, 1024))](
            pairs, chosen, common, out, hidden, COUNT=count, CHOSEN=triton.next_power_of_2(count), BLOCK=1024
        )


def experts_tile(block_m: int, dtype: torch.dtype, halves: int) -> dict[str, int]:
    """Return the kernels' tile sizes, warps and pipeline stages.

    ``block_m``: pairs of a block, the tile's rows. ``halves``: products that a program computes at a time, 2 for gate
    and up.
    """
    is_wide = dtype != torch.float32
    n = (128 if is_wide else 64) // halves
    sizes = {"M": block_m, "N": n, "K": 64 if is_wide else 32}
    return sizes | {"num_warps": 8 if block_m >= 128 else 4, "num_stages": 4 if is_wide and block_m <= 32 else 3}


@triton.jit(do_not_specialize=["size"])
def _count_pairs(chosen_ptr: tl.tensor, counts_ptr: tl.tensor, size: tl.tensor, SCAN: tl.constexpr) -> None:
    expert = tl.program_id(0)
    count = tl.zeros((), tl.int32)
    for begin in range(0, size, SCAN):
        at = begin + tl.arange(0, SCAN)
        count += tl.sum((tl.load(chosen_ptr + at, mask=at < size, other=-1) == expert).to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit(do_not_specialize=["size"])
def _place_pairs(
    chosen_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    size: tl.tensor,
    experts: tl.tensor,
    M: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCAN: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts_ptr + index, mask=index < experts, other=0) + (M - 1)) // M
    first = tl.sum(tl.where(index < expert, blocks, 0), 0)
    own = tl.sum(tl.where(index == expert, blocks, 0), 0)
    for block in range(own):
        tl.store(experts_ptr + first + block, expert)
        tl.store(pairs_ptr + (first + block) * M + tl.arange(0, M), tl.zeros([M], tl.int32) + size)
    tl.debug_barrier()  # the last block is filled up before its pairs are written
    done = first * M
    for begin in range(0, size, SCAN):
        at = begin + tl.arange(0, SCAN)
        is_own = tl.load(chosen_ptr + at, mask=at < size, other=-1) == expert
        tl.store(pairs_ptr + done + tl.cumsum(is_own.to(tl.int32), 0) - 1, at, mask=is_own)
        done += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _add_product(x: tl.tensor, weight: tl.tensor, total: tl.tensor) -> tl.tensor:
    if _INTERPRETED:  # which takes the bits of a bfloat16 for a number; as float32 the products are the same
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, weight, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_up(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    x_token: tl.tensor,
    num_pairs: tl.tensor,
    chosen: tl.tensor,
    inner: tl.tensor,
    hidden: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * M + tl.arange(0, M))
        is_pair = pair < num_pairs
        column = tl.program_id(1) * N + tl.arange(0, N)
        is_column, k = column < inner, tl.arange(0, K)
        rows_ptr = x_ptr + (pair // chosen).to(tl.int64)[:, None] * x_token + k[None, :]
        gate_ptr = weight_ptr + (expert * 2 * inner + column[None, :]) * hidden + k[:, None]
        up_ptr = gate_ptr + inner.to(tl.int64) * hidden
        gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
        for begin in range(0, hidden, K):
            is_k = k < hidden - begin
            x = tl.load(rows_ptr + begin, mask=is_pair[:, None] & is_k[None, :], other=0.0)
            is_weight = is_k[:, None] & is_column[None, :]
            gate = _add_product(x, tl.load(gate_ptr + begin, mask=is_weight, other=0.0), gate)
            up = _add_product(x, tl.load(up_ptr + begin, mask=is_weight, other=0.0), up)
        if bias_ptr is not None:
            own_bias_ptr = bias_ptr + expert * 2 * inner + column
            gate += tl.load(own_bias_ptr, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own_bias_ptr + inner, mask=is_column, other=0.0).to(tl.float32)[None, :]
        to = out_ptr + pair.to(tl.int64)[:, None] * inner + column[None, :]
        result = gated(gate, up, limit, KIND).to(out_ptr.dtype.element_ty)
        tl.store(to, result, mask=is_pair[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_down(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pair_weights_ptr: tl.tensor,
    num_pairs: tl.tensor,
    hidden: tl.tensor,
    inner: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs_ptr + tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
        is_pair = pair < num_pairs
        column = tl.program_id(1) * N + tl.arange(0, N)
        is_column, k = column < hidden, tl.arange(0, K)
        rows_ptr = x_ptr + pair[:, None] * inner + k[None, :]
        columns_ptr = weight_ptr + (expert * hidden + column[None, :]) * inner + k[:, None]
        total = tl.zeros([M, N], tl.float32)
        for begin in range(0, inner, K):
            is_k = k < inner - begin
            x = tl.load(rows_ptr + begin, mask=is_pair[:, None] & is_k[None, :], other=0.0)
            weight = tl.load(columns_ptr + begin, mask=is_k[:, None] & is_column[None, :], other=0.0)
            total = _add_product(x, weight, total)
        if bias_ptr is not None:
            own_bias = tl.load(bias_ptr + expert * hidden + column, mask=is_column, other=0.0)
            total += own_bias.to(tl.float32)[None, :]
        total *= tl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)[:, None]
        tl.store(out_ptr + pair[:, None] * hidden + column[None, :], total, mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _combine(
    pairs_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    common_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < hidden
    index = tl.arange(0, CHOSEN)
    experts = tl.load(chosen_ptr + token * COUNT + index, mask=index < COUNT, other=0x7FFFFFFF).to(tl.int64)
    # The place of each among the token's own, by their numbers.
    is_before = (experts[None, :] < experts[:, None]) | (
        (experts[None, :] == experts[:, None]) & (index[None, :] < index[:, None])
    )
    ranks = tl.sum(is_before.to(tl.int32), 1)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(COUNT):
        pair = token * COUNT + tl.sum(tl.where(ranks == rank, index, 0), 0)
        total += tl.load(pairs_ptr + pair * hidden + at, mask=is_in, other=0.0)
    if common_ptr is not None:
        total += tl.load(common_ptr + token * hidden + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + at, total.to(out_ptr.dtype.element_ty), mask=is_in)
