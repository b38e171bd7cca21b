"""The first launches of the sampler, over chunks of the vocabulary: see ``sampling.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from .draw_math import distance, is_finite, logit_of, mass_of, order_of, share_of, weight_at
from .row_reads import draws_from_all, edited_logits, float_word, is_drawn, least_weight, temperature_of
from .row_table import TOP_K, TOP_P, WORDS

LEVELS = tl.constexpr(10)
"""Level ``l`` reaches (l + 1)^2 / 8 below the best logit, over temperature; the next one takes all tokens."""


@triton.jit
def row_best(best_ptr: tl.tensor, i: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best_ptr + i * chunks + at, mask=at < chunks, other=-1), 0)


@triton.jit
def of_chunks(
    values_ptr: tl.tensor, i: tl.tensor, level: tl.tensor, end: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tl.tensor:
    """Return the sum of a row's counts or masses at one level of distance from the best logit.

    ``values_ptr``: counts or masses by row, level and chunk of the vocabulary. ``i``: index of the row in the batch.
    Only chunks before number ``end`` are added. ``chunks``: chunks of a row; ``CHUNKS``: a power of two, at least that.
    """
    at = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(values_ptr + (i * (LEVELS + 1) + level) * chunks + at, mask=at < end, other=0), 0)


@triton.jit
def enough(
    words_ptr: tl.tensor,
    level_counts_ptr: tl.tensor,
    level_masses_ptr: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Return the nearest level of distance from the best logit with enough tokens for the row's top-k.

    Without top-k, its tokens must have enough mass for top-p. The result is ``LEVELS``, all tokens, if no level
    suffices. ``row``: the row of the table ``words_ptr``. ``i``: its index in the batch, and so in the levels' counts
    and masses.
    """
    top_k = tl.load(words_ptr + row * WORDS + TOP_K)
    total = of_chunks(level_masses_ptr, i, LEVELS, chunks, chunks, CHUNKS)
    mass = share_of(total, float_word(words_ptr, row, TOP_P))
    first = LEVELS + 0
    for below in tl.static_range(LEVELS):
        level = LEVELS - 1 - below
        has_count = of_chunks(level_counts_ptr, i, level, chunks, chunks, CHUNKS) >= top_k
        has_mass = of_chunks(level_masses_ptr, i, level, chunks, chunks, CHUNKS) >= mass
        first = tl.where(((top_k > 0) & has_count) | ((top_k == 0) & has_mass), level, first)
    return first


@triton.jit
def find_best(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    vocab: tl.tensor,
    best_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
    if row >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = edited_logits(logits_ptr + i * stride, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab)
        tl.store(best_ptr + i * chunks + chunk, tl.max(tl.where(ids < vocab, order_of(logits, ids), -1), 0))


@triton.jit
def measure(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    vocab: tl.tensor,
    best_ptr: tl.tensor,
    level_counts_ptr: tl.tensor,
    level_masses_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
    if is_drawn(words_ptr, row) & is_finite(row_best(best_ptr, i, chunks, CHUNKS)):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = edited_logits(logits_ptr + i * stride, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab)
        largest = logit_of(row_best(best_ptr, i, chunks, CHUNKS))
        x = distance(logits, largest, temperature_of(words_ptr, row))
        weights = weight_at(x)
        masses = tl.where(ids < vocab, mass_of(weights), 0)
        to = i * (LEVELS + 1) * chunks + chunk
        if draws_from_all(words_ptr, row):
            kept = tl.where(weights >= least_weight(words_ptr, row), masses, 0)
            tl.store(level_masses_ptr + to + LEVELS * chunks, tl.sum(kept, 0))
        else:
            for level in tl.static_range(LEVELS):
                is_in = x >= -0.125 * (level + 1) * (level + 1)
                tl.store(level_counts_ptr + to + level * chunks, tl.sum(is_in.to(tl.int64), 0))
                tl.store(level_masses_ptr + to + level * chunks, tl.sum(tl.where(is_in, masses, 0), 0))
            tl.store(level_counts_ptr + to + LEVELS * chunks, tl.sum((ids < vocab).to(tl.int64), 0))
            tl.store(level_masses_ptr + to + LEVELS * chunks, tl.sum(masses, 0))


@triton.jit
def collect(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    vocab: tl.tensor,
    best_ptr: tl.tensor,
    level_counts_ptr: tl.tensor,
    level_masses_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
    if is_drawn(words_ptr, row) & is_finite(row_best(best_ptr, i, chunks, CHUNKS)):
        if not draws_from_all(words_ptr, row):
            level = enough(words_ptr, level_counts_ptr, level_masses_ptr, row, i, chunks, CHUNKS)
            if of_chunks(level_counts_ptr, i, level, chunks, chunks, CHUNKS) <= LIST:
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                logits = edited_logits(
                    logits_ptr + i * stride, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab
                )
                largest = logit_of(row_best(best_ptr, i, chunks, CHUNKS))
                x = distance(logits, largest, temperature_of(words_ptr, row))
                reach = tl.where(level == LEVELS, float("inf"), ((level + 1) * (level + 1)).to(tl.float32))
                is_in = (x >= -0.125 * reach) & (ids < vocab)
                before = of_chunks(level_counts_ptr, i, level, chunk, chunks, CHUNKS)
                to = before + tl.cumsum(is_in.to(tl.int32), 0) - 1
                tl.store(lists_ptr + i * LIST + to, order_of(logits, ids), mask=is_in)
