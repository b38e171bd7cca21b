"""The last launches of the sampler, a program a row: see ``sampling.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from .draw_levels import LEVELS, enough, of_chunks, row_best
from .draw_math import (
    ORDER_BITS,
    distance,
    id_of,
    is_finite,
    logit_of,
    mass_of,
    order_of,
    share_of,
    target_in,
    uniform,
    weight_at,
)
from .row_reads import draws_from_all, edited_logits, float_word, is_drawn, least_weight, temperature_of
from .row_table import EDITS, ONE_OUTPUT, SEED, TOP_K, TOP_P, WORDS


@triton.jit
def choose(
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
    last_tokens_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    chunks: tl.tensor,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
    if row >= 0:
        best = row_best(best_ptr, i, chunks, CHUNKS)
        token = id_of(best)
        is_chosen = True
        if DRAWS:
            if is_drawn(words_ptr, row) & is_finite(best):
                at = uniform(tl.load(words_ptr + row * WORDS + SEED), position)
                if draws_from_all(words_ptr, row):
                    masses_ptr = level_masses_ptr + (i * (LEVELS + 1) + LEVELS) * chunks
                    chunk, target = _chunk_at(masses_ptr, at, chunks, CHUNKS)
                    ids = chunk * CHUNK + tl.arange(0, CHUNK)
                    logits = edited_logits(
                        logits_ptr + i * stride, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab
                    )
                    weights = weight_at(distance(logits, logit_of(best), temperature_of(words_ptr, row)))
                    is_kept = (ids < vocab) & (weights >= least_weight(words_ptr, row))
                    cumulated = tl.cumsum(tl.where(is_kept, mass_of(weights), 0), 0)
                    token = chunk * CHUNK + tl.sum((cumulated <= target).to(tl.int64), 0)
                else:
                    level = enough(words_ptr, level_counts_ptr, level_masses_ptr, row, i, chunks, CHUNKS)
                    size = of_chunks(level_counts_ptr, i, level, chunks, chunks, CHUNKS)
                    is_chosen = size <= LIST
                    if is_chosen:
                        total = of_chunks(level_masses_ptr, i, LEVELS, chunks, chunks, CHUNKS)
                        token = _from_list(lists_ptr + i * LIST, words_ptr, row, best, size, total, at, LIST)
        if is_chosen:
            _finish(words_ptr, counts_ptr, last_tokens_ptr, tokens_ptr, finite_ptr, row, i, best, token, vocab)


@triton.jit
def _finish(
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    best: tl.tensor,
    token: tl.tensor,
    vocab: tl.tensor,
) -> None:
    tl.store(tokens_ptr + i, token)
    tl.store(finite_ptr + i, is_finite(best))
    tl.store(last_tokens_ptr + row, token)
    place = tl.load(words_ptr + row * WORDS + EDITS)
    if place >= 0:
        to = counts_ptr + place * vocab + token
        tl.store(to, tl.load(to) + ONE_OUTPUT)


@triton.jit
def _chunk_at(
    masses_ptr: tl.tensor, at: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the chunk of the vocabulary that a row's token is drawn from, and how much of the target lies within it.

    ``at``: the uniform number in [0, 1). ``masses_ptr``: mass of each of the row's ``chunks`` chunks, the summed
    fixed-point weights of its tokens. The target is the share ``at`` of their sum. ``CHUNKS``: a power of two, at least
    ``chunks``.
    """
    index = tl.arange(0, CHUNKS)
    masses = tl.load(masses_ptr + index, mask=index < chunks, other=0)
    target = target_in(tl.sum(masses, 0), at)
    is_before = tl.cumsum(masses, 0) <= target
    return tl.sum(is_before.to(tl.int64), 0), target - tl.sum(tl.where(is_before, masses, 0), 0)


@triton.jit
def _last_kept(orders: tl.tensor, amounts: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the largest rank key at which the tokens at or above it reach ``wanted``; 0 if all together do not.

    ``orders``: rank keys of the tokens, larger for better ones. ``amounts``: what each adds up to ``wanted``, 1 to find
    the k-th token or its mass to find the end of the nucleus.
    """
    border = tl.zeros((), tl.int64)
    for step in range(ORDER_BITS):
        higher = border + (tl.full((), 1, tl.int64) << (ORDER_BITS - 1 - step))
        border = tl.where(tl.sum(tl.where(orders >= higher, amounts, 0), 0) >= wanted, higher, border)
    return border


@triton.jit
def _from_list(
    list_ptr: tl.tensor,
    words_ptr: tl.tensor,
    row: tl.tensor,
    best: tl.tensor,
    size: tl.tensor,
    total: tl.tensor,
    at: tl.tensor,
    LIST: tl.constexpr,
) -> tl.tensor:
    """Apply top-k, top-p and min-p to a row's list of tokens, draw one of the rest, and return its id.

    ``list_ptr``: rank keys (``order_of``) of the row's best tokens, in order of ids. ``size``: how many there are.
    ``words_ptr``: sampling parameters of all rows. ``best``: rank key of the row's best token. ``total``: mass (sum of
    fixed-point weights) of the whole vocabulary, of which top-p keeps a share unless top-k comes first. ``at``: the
    uniform number in [0, 1).
    """
    index = tl.arange(0, LIST)
    orders = tl.load(list_ptr + index, mask=index < size, other=0)
    orders = tl.where(index < size, orders, best)
    weights = weight_at(distance(logit_of(orders), logit_of(best), temperature_of(words_ptr, row)))
    masses = tl.where(index < size, mass_of(weights), 0)
    top_k, top_p = tl.load(words_ptr + row * WORDS + TOP_K), float_word(words_ptr, row, TOP_P)
    if top_k > 0:
        border = _last_kept(orders, (index < size).to(tl.int64), top_k)
        masses = tl.where(orders >= border, masses, 0)
        total = tl.sum(masses, 0)
    if top_p < float("inf"):
        border = _last_kept(orders, masses, share_of(total, top_p))
        masses = tl.where(orders >= border, masses, 0)
    masses = tl.where(weights >= least_weight(words_ptr, row), masses, 0)
    cumulated = tl.cumsum(masses, 0)
    chosen = tl.sum((cumulated <= target_in(tl.sum(masses, 0), at)).to(tl.int32), 0)
    return id_of(tl.sum(tl.where(index == chosen, orders, 0), 0))


@triton.jit
def _down_to(
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    border: tl.tensor,
    chunk: tl.tensor,
    CHUNK: tl.constexpr,
    BY_COUNT: tl.constexpr,
) -> tl.tensor:
    """Return, for each token of chunk ``chunk``, its mass if its rank key is at least ``border``, else 0.

    The result is int64 [CHUNK]. With ``BY_COUNT``, it has 1 in place of each mass.

    ``logits_ptr``: the row's first logit. ``words_ptr``: sampling parameters of all rows (``row_table.py``).
    ``counts_ptr``, ``biases_ptr``: logit edits of all rows. ``row``: the row's number in these tables.
    ``position``: that of the token to be chosen. ``best``: rank key (``order_of``) of the row's best token.
    A token's mass (``mass_of``) is exp((logit - best logit) / temperature) as a fixed-point number.
    """
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = edited_logits(logits_ptr, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab)
    is_in = (ids < vocab) & (order_of(logits, ids) >= border)
    if BY_COUNT:
        amounts = is_in.to(tl.int64)
    else:
        weights = weight_at(distance(logits, logit_of(best), temperature_of(words_ptr, row)))
        amounts = tl.where(is_in, mass_of(weights), 0)
    return amounts


@triton.jit
def _border(
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    least: tl.tensor,
    wanted: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    BY_COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the lowest rank key that top-k or top-p keeps in a row, and the mass of the tokens at or above it.

    It is the largest key at which the tokens at or above it reach ``wanted``, a count with ``BY_COUNT``, else a mass.
    It is never below ``least``, a rank key: tokens below that are left out. The other arguments are those of
    ``_down_to``; ``chunks``: chunks of the row.
    """
    border = tl.zeros((), tl.int64)
    for step in range(ORDER_BITS):
        higher = border + (tl.full((), 1, tl.int64) << (ORDER_BITS - 1 - step))
        amount = tl.zeros((), tl.int64)
        for chunk in range(chunks):
            amounts = _down_to(
                logits_ptr,
                words_ptr,
                counts_ptr,
                biases_ptr,
                row,
                position,
                vocab,
                best,
                tl.maximum(higher, least),
                chunk,
                CHUNK,
                BY_COUNT,
            )
            amount += tl.sum(amounts, 0)
        border = tl.where(amount >= wanted, higher, border)
    border = tl.maximum(border, least)
    mass = tl.zeros((), tl.int64)
    for chunk in range(chunks):
        masses = _down_to(
            logits_ptr, words_ptr, counts_ptr, biases_ptr, row, position, vocab, best, border, chunk, CHUNK, False
        )
        mass += tl.sum(masses, 0)
    return border, mass


@triton.jit
def search(
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
    last_tokens_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
    if is_drawn(words_ptr, row):
        best = row_best(best_ptr, i, chunks, CHUNKS)
        if is_finite(best):
            if not draws_from_all(words_ptr, row):
                level = enough(words_ptr, level_counts_ptr, level_masses_ptr, row, i, chunks, CHUNKS)
                if of_chunks(level_counts_ptr, i, level, chunks, chunks, CHUNKS) > LIST:
                    total = of_chunks(level_masses_ptr, i, LEVELS, chunks, chunks, CHUNKS)
                    token = _from_vocabulary(
                        logits_ptr + i * stride,
                        words_ptr,
                        counts_ptr,
                        biases_ptr,
                        row,
                        position,
                        vocab,
                        best,
                        total,
                        chunks,
                        CHUNK,
                    )
                    _finish(words_ptr, counts_ptr, last_tokens_ptr, tokens_ptr, finite_ptr, row, i, best, token, vocab)


@triton.jit
def _from_vocabulary(
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Apply the row's top-k, top-p and min-p to all tokens of the vocabulary, draw one of the rest, and return its id.

    ``best``: rank key of the row's best token. ``total``: mass of the whole vocabulary. The uniform number follows from
    the row's seed and ``position``. The other arguments are those of ``_down_to``.
    """
    top_k, top_p = tl.load(words_ptr + row * WORDS + TOP_K), float_word(words_ptr, row, TOP_P)
    border = tl.zeros((), tl.int64)
    if top_k > 0:
        border, total = _border(
            logits_ptr,
            words_ptr,
            counts_ptr,
            biases_ptr,
            row,
            position,
            vocab,
            best,
            border,
            top_k,
            chunks,
            CHUNK,
            True,
        )
    if top_p < float("inf"):
        border, total = _border(
            logits_ptr,
            words_ptr,
            counts_ptr,
            biases_ptr,
            row,
            position,
            vocab,
            best,
            border,
            share_of(total, top_p),
            chunks,
            CHUNK,
            False,
        )
    least, kept = least_weight(words_ptr, row), tl.zeros((), tl.int64)
    for chunk in range(chunks):
        masses = _kept(
            logits_ptr, words_ptr, counts_ptr, biases_ptr, row, position, vocab, best, border, least, chunk, CHUNK
        )
        kept += tl.sum(masses, 0)
    target = target_in(kept, uniform(tl.load(words_ptr + row * WORDS + SEED), position))
    before, token = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for chunk in range(chunks):
        masses = _kept(
            logits_ptr, words_ptr, counts_ptr, biases_ptr, row, position, vocab, best, border, least, chunk, CHUNK
        )
        token += tl.sum((before + tl.cumsum(masses, 0) <= target).to(tl.int64), 0)
        before += tl.sum(masses, 0)
    return token


@triton.jit
def _kept(
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    vocab: tl.tensor,
    best: tl.tensor,
    border: tl.tensor,
    least: tl.tensor,
    chunk: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Return the masses of a chunk's tokens, int64 [CHUNK], with 0 for those that are dropped.

    ``border``: lowest rank key that top-k and top-p keep. ``least``: lowest weight that min-p keeps, of which the best
    token has 1. The other arguments are those of ``_down_to``.
    """
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = edited_logits(logits_ptr, words_ptr, counts_ptr, biases_ptr, row, position, ids, vocab)
    weights = weight_at(distance(logits, logit_of(best), temperature_of(words_ptr, row)))
    is_kept = (ids < vocab) & (order_of(logits, ids) >= border) & (weights >= least)
    return tl.where(is_kept, mass_of(weights), 0)
