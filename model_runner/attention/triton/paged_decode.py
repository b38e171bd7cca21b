"""Attention of rows that compute one token each (FlashDecoding). A row's KV is cut into splits, summed up apart.

How a row is cut depends on its length alone (``tiles.split_tokens``), so its result is the same to the bit in any
company. Splits times KV heads are work items. A fixed number of programs, enough to fill the device, takes them one
after another. So the grid does not depend on lengths, and a captured graph fits any. The query heads that share a KV
head stand in the rows of one product: K and V are read once for all of them. The product's padding to 16 rows costs
nothing, as the kernel waits for memory.

Tuned for memory: a program streams [N, head] tiles of keys and values through a pipeline of ``num_stages`` copies to
shared memory, 16 bytes a thread. Two programs of 96 KiB share a multiprocessor of an H100. They keep 128 KiB on the
way, where 15 KiB would hide the latency of HBM (3.35 TB/s x 600 ns / 132). Neighbouring programs take the KV heads of
one token range, which lie beside each other in a page.

Letters: B entries, H heads, S splits of all entries, V elements of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import LOG2E, attend_block, load_columns, precision, token_offsets
from .pool_views import LayerViews
from .tiles import MOST_SPLITS, DecodeTiles

REDUCED_COLUMNS = 64
"""Elements of a value that one program of the reduction puts together: a tile [MOST_SPLITS, 64] of float32, 16 KiB."""


@triton.jit(do_not_specialize=["num_entries"])
def paged_decode_split(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    tokens: tl.tensor,
    kv_lens: tl.tensor,
    kv_indptr: tl.tensor,
    kv_indices: tl.tensor,
    split_indptr: tl.tensor,
    split_sizes: tl.tensor,
    partial_sums: tl.tensor,
    partial_peaks: tl.tensor,
    partial_totals: tl.tensor,
    num_entries: int,
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
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute the attention of one-token entries to each split of their KV, for ``paged_decode_reduce`` to combine.

    ``tokens``: each entry's token in the pass, a row of ``q``. ``kv_indices``: page numbers of all entries, which begin
    at ``kv_indptr``. ``split_indptr``, ``split_sizes``: each entry's first split, and the tokens of its splits.
    ``GROUP`` query heads share a KV head and are taken ``BLOCK_H`` at a time; ``ENTRIES``: at least B. For each split,
    ``partial_sums`` [S, H, V] get weighted values; ``partial_peaks`` and ``partial_totals`` [S, H] get the softmax's
    state, as in ``attend.py``.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    PARTS: tl.constexpr = KV_HEADS * HEAD_BLOCKS
    entries = tl.arange(0, ENTRIES)
    ends = tl.load(split_indptr + 1 + entries, mask=entries < num_entries, other=2147483647)
    num_items = tl.load(split_indptr + num_entries) * PARTS
    lanes = tl.arange(0, BLOCK_N)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = item // PARTS
        kv_head = item % PARTS // HEAD_BLOCKS
        in_group = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = in_group < GROUP
        heads = kv_head * GROUP + in_group
        entry = tl.sum((ends <= split).to(tl.int32), 0)
        kv_len = tl.load(kv_lens + entry)
        size = tl.load(split_sizes + entry)
        begin = (split - tl.load(split_indptr + entry)) * size
        if WINDOW:
            begin += tl.maximum(kv_len - WINDOW, 0)
        end = tl.minimum(begin + size, kv_len)
        pages = kv_indices + tl.load(kv_indptr + entry)
        token = tl.load(tokens + entry).to(tl.int64)
        q_rows = token * q_token_stride + heads * q_head_stride
        q_tile = load_columns(q, q_rows, is_head, 0, VALUE_DIM, BLOCK_V)
        q_rest = q_tile
        if REST_DIM:
            q_rest = load_columns(q, q_rows, is_head, VALUE_DIM, REST_DIM, BLOCK_R)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        for n in range(begin, end, BLOCK_N):
            at = n + lanes
            is_there = at < end
            offsets = token_offsets(pages, at, is_there, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE) + kv_head * HEAD_STRIDE
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
                offsets,
                is_there,
                is_there[None, :],
                scale,
                KIND,
                VALUE_DIM,
                BLOCK_V,
                REST_DIM,
                BLOCK_R,
                SOFTCAP,
                PRECISION,
            )
        rows = split.to(tl.int64) * (KV_HEADS * GROUP) + heads
        columns = tl.arange(0, BLOCK_V)
        mask = is_head[:, None] & (columns < VALUE_DIM)[None, :]
        tl.store(partial_sums + rows[:, None] * VALUE_DIM + columns[None, :], acc, mask=mask)
        tl.store(partial_peaks + rows, peak, mask=is_head)
        tl.store(partial_totals + rows, total, mask=is_head)


@triton.jit
def paged_decode_reduce(
    out: tl.tensor,
    sinks: tl.tensor,
    tokens: tl.tensor,
    split_indptr: tl.tensor,
    partial_sums: tl.tensor,
    partial_peaks: tl.tensor,
    partial_totals: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Combine the splits of entry ``program_id(0)`` and head ``program_id(1)``, and write the attention.

    It goes to ``out`` [T, H, V]. ``tokens`` [B] names the row of ``out`` that each entry's result goes to.
    ``split_indptr`` [B + 1] names each entry's splits, at most ``SPLITS`` of them. The partial results are
    those of ``paged_decode_split``. ``sinks`` [H] is read only if ``HAS_SINKS``.
    ``program_id(2)`` names the ``BLOCK`` elements of the value that a program combines.
    """
    entry = tl.program_id(0)
    head = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(split_indptr + entry)
    ordinals = tl.arange(0, SPLITS)
    is_split = ordinals < tl.load(split_indptr + entry + 1) - first
    rows = (first + ordinals).to(tl.int64) * HEADS + head
    peaks = tl.load(partial_peaks + rows, mask=is_split, other=float("-inf"))
    totals = tl.load(partial_totals + rows, mask=is_split, other=0.0)
    peak = tl.max(peaks, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(weights * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    mask = is_split[:, None] & (columns < VALUE_DIM)[None, :]
    sums = tl.load(partial_sums + rows[:, None] * VALUE_DIM + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    where = out + (tl.load(tokens + entry).to(tl.int64) * HEADS + head) * VALUE_DIM + columns
    tl.store(where, result.to(out.dtype.element_ty), mask=columns < VALUE_DIM)


class Splits(NamedTuple):
    """How a step's rows are cut for layers of one window. int32: ``indptr`` [B + 1] and ``sizes`` [B], in tokens."""

    indptr: Tensor
    sizes: Tensor


class Partials(NamedTuple):
    """Room for sums of up to S splits, float32: ``sums`` [S, H, V], ``peaks`` and ``totals`` [S, H]."""

    sums: Tensor
    peaks: Tensor
    totals: Tensor

    @classmethod
    def make(cls, splits: int, heads: int, value_dim: int, device: torch.device) -> Partials:
        """Allocate uninitialised float32 arrays on ``device`` for the partial results of up to ``splits`` splits."""
        rows = (splits, heads)
        sums = torch.empty((*rows, value_dim), dtype=torch.float32, device=device)
        return cls(sums, *(torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2)))


class DecodeRows(NamedTuple):
    """Entries of one token, int32: ``tokens`` [B] (where in the pass each stands), ``kv_lens`` [B], ``kv_indptr`` and
    ``kv_indices`` as in ``step_plan.PagedIndices``. ``entries``: a number that B never exceeds, a power of two.
    """

    tokens: Tensor
    kv_lens: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    entries: int


class AttentionTerms(NamedTuple):
    """What a layer's attention is; see ``AttentionSpec``. Without a ``window`` or ``softcap``: 0."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


def paged_decode(
    q_THD: Tensor,
    out_THV: Tensor,
    pool: LayerViews,
    rows: DecodeRows,
    splits: Splits,
    partials: Partials,
    attention: AttentionTerms,
    tiles: DecodeTiles,
    num_programs: int,
) -> None:
    """Queue the attention of the one-token entries ``rows`` over their stored KV.

    It is written to their tokens of ``out_THV``. ``num_programs`` share the splits' work; no result depends on it.
    """
    heads, batch = q_THD.shape[1], len(rows.kv_lens)
    rest = pool.head_dim - pool.value_dim
    paged_decode_split[(num_programs,)](
        q_THD,
        *pool.tensors,
        rows.tokens,
        rows.kv_lens,
        rows.kv_indptr,
        rows.kv_indices,
        *splits,
        *partials,
        batch,
        q_THD.stride(0),
        q_THD.stride(1),
        attention.scale,
        KIND=pool.kind,
        **pool.strides,
        KV_HEADS=pool.heads,
        GROUP=heads // pool.heads,
        **columns(pool.value_dim, rest),
        WINDOW=attention.window,
        SOFTCAP=attention.softcap,
        PRECISION=precision(q_THD.dtype),
        ENTRIES=rows.entries,
        BLOCK_H=tiles.block_h,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    paged_decode_reduce[(batch, heads, triton.cdiv(pool.value_dim, REDUCED_COLUMNS))](
        out_THV,
        out_THV if attention.sinks is None else attention.sinks,
        rows.tokens,
        splits.indptr,
        *partials,
        HEADS=heads,
        VALUE_DIM=pool.value_dim,
        HAS_SINKS=attention.sinks is not None,
        SPLITS=MOST_SPLITS,
        BLOCK=REDUCED_COLUMNS,
    )


def columns(value_dim: int, rest_dim: int) -> dict[str, int]:
    """Return the kernels' constants for a row's elements: sizes, and blocks padded to powers of two of at least 16.

    ``rest_dim``: elements of a latent row's key beyond its value; 0 otherwise.
    """
    return {
        "VALUE_DIM": value_dim,
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "REST_DIM": rest_dim,
        "BLOCK_R": max(16, triton.next_power_of_2(rest_dim)),
    }
