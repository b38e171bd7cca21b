"""Attention of rows that compute several tokens: chunks of prompts over what their rows hold, cached prefixes included.

A program takes a tile of M rows: queries times the heads that share a KV head. It goes along the row's KV in blocks of
N tokens that begin at multiples of N. Blocks that every query of the tile sees in full are multiplied without masks;
only the diagonal and a window's edge have them. A token's result is the same to the bit however its prompt is cut into
chunks of two tokens or more, and in any company.

Tuned for the tensor cores: on an H100, [128, 128] queries of 8 warps meet blocks of 64 or 128 tokens by ``wgmma``. The
queries are in registers, keys and values in a pipeline of shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attend import LOG2E, attend_block, load_columns, precision, token_offsets
from .paged_decode import AttentionTerms, columns
from .pool_views import LayerViews
from .tiles import PrefillTiles


@triton.jit
def paged_prefill(
    q: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    tiles: tl.tensor,
    first_tokens: tl.tensor,
    q_lens: tl.tensor,
    kv_lens: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    q_token_stride: int,
    q_head_stride: int,
    scale: float,
    KIND: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute the attention of tile ``program_id(0)`` of queries, for ``HEADS_AT_ONCE`` heads by ``program_id(1)``.

    ``tiles``: entry and first query of each tile. ``first_tokens``: row of ``q`` and ``out`` of each entry's first
    token. ``q_lens``: the entry's tokens in this pass. ``kv_lens``: all tokens that its last one sees. ``kv_indices``:
    page numbers of all entries, which begin at ``kv_indptr``.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    QUERIES: tl.constexpr = BLOCK_M // HEADS_AT_ONCE
    entry = tl.load(tiles + tl.program_id(0) * 2)
    first_query = tl.load(tiles + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    q_len = tl.load(q_lens + entry)
    kv_len = tl.load(kv_lens + entry)
    pages = kv_indices + tl.load(kv_indptr + entry)

    rows = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % HEAD_BLOCKS * HEADS_AT_ONCE + rows % HEADS_AT_ONCE
    queries = first_query + rows // HEADS_AT_ONCE
    is_row = (rows < QUERIES * HEADS_AT_ONCE) & (queries < q_len) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    tokens = (tl.load(first_tokens + entry) + queries).to(tl.int64)
    q_rows = tokens * q_token_stride + heads * q_head_stride
    q_tile = load_columns(q, q_rows, is_row, 0, VALUE_DIM, BLOCK_V)
    q_rest = q_tile
    if REST_DIM:
        q_rest = load_columns(q, q_rows, is_row, VALUE_DIM, REST_DIM, BLOCK_R)

    positions = kv_len - q_len + queries
    first = kv_len - q_len + first_query
    end = tl.minimum(first + QUERIES, kv_len)
    # Blocks from ``begin`` on have tokens that some query sees; those of [all_from, all_to) only such that all see.
    begin = 0
    lowest = 0
    all_from = 0
    if WINDOW:
        lowest = tl.maximum(first - WINDOW + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        all_from = (tl.maximum(end - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    all_to = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, all_from)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    lanes = tl.arange(0, BLOCK_N)
    for part in tl.static_range(0, 3):
        # Behind the window's edge, within what all see, and on the diagonal.
        if part == 0:
            low, high = begin, all_from
        elif part == 1:
            low, high = all_from, all_to
        else:
            low, high = all_to, end
        if part != 0 or WINDOW:
            # The edges are a few blocks: a pipeline would cost registers there, and save nothing.
            for n in tl.range(low, high, BLOCK_N, num_stages=None if part == 1 else 1):
                at = n + lanes
                is_there = (at < end) & (at >= lowest)
                is_seen = None
                if part != 1:
                    is_seen = at[None, :] <= positions[:, None]
                    if WINDOW:
                        is_seen &= at[None, :] > positions[:, None] - WINDOW
                offsets = token_offsets(pages, at, is_there, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE)
                peak, total, acc = attend_block(
                    q_tile,
                    q_rest,
                    peak,
                    total,
                    acc,
                    k_pool,
                    v_pool,
                    k_scales,
                    v_scales,
                    offsets + kv_head * HEAD_STRIDE,
                    is_there,
                    is_seen,
                    scale,
                    KIND,
                    VALUE_DIM,
                    BLOCK_V,
                    REST_DIM,
                    BLOCK_R,
                    SOFTCAP,
                    PRECISION,
                )

    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(peak, sink)
        decay = tl.exp2(peak - highest)
        total = total * decay + tl.exp2(sink - highest)
        acc *= decay[:, None]
    # Rows behind the tile's last may have seen nothing.
    total = tl.where(is_row, total, 1.0)
    value_columns = tl.arange(0, BLOCK_V)
    where = out + (tokens * (KV_HEADS * GROUP) + heads)[:, None] * VALUE_DIM + value_columns[None, :]
    mask = is_row[:, None] & (value_columns < VALUE_DIM)[None, :]
    tl.store(where, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


class ExtendRows(NamedTuple):
    """Entries of several tokens, int32: ``first_tokens`` [E] (where in the pass each begins), ``q_lens`` and
    ``kv_lens`` [E], ``kv_indptr`` and ``kv_indices`` as in ``step_plan.PagedIndices``.
    """

    first_tokens: Tensor
    q_lens: Tensor
    kv_lens: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor


def prefill(
    q_THD: Tensor,
    out_THV: Tensor,
    pool: LayerViews,
    rows: ExtendRows,
    tile_list: Tensor,
    attention: AttentionTerms,
    tiles: PrefillTiles,
) -> None:
    """Queue the attention of the entries ``rows`` over their stored KV, for their tokens of ``out_THV``.

    ``tile_list``: int32 [tiles, 2], entry and first query of each tile; see ``tiles.prefill_tile_list``.
    """
    heads = q_THD.shape[1]
    group = heads // pool.heads
    at_once = min(group, tiles.block_m)
    paged_prefill[(len(tile_list), pool.heads * triton.cdiv(group, at_once))](
        q_THD,
        out_THV,
        out_THV if attention.sinks is None else attention.sinks,
        *pool.tensors,
        tile_list,
        *rows,
        q_THD.stride(0),
        q_THD.stride(1),
        attention.scale,
        KIND=pool.kind,
        **pool.strides,
        KV_HEADS=pool.heads,
        GROUP=group,
        **columns(pool.value_dim, pool.head_dim - pool.value_dim),
        WINDOW=attention.window,
        SOFTCAP=attention.softcap,
        PRECISION=precision(q_THD.dtype),
        HAS_SINKS=attention.sinks is not None,
        HEADS_AT_ONCE=at_once,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
