"""Chooses the next token of each row by the rules of ``rules.py``, on the device: nothing waits, nothing is sorted.

A row is divided into chunks of the vocabulary of one size. Each program works on one chunk of a row. Programs
exchange results only between launches:

    best      of each chunk the best token. A batch of greedy rows goes on with ``choose``.
    measure   of each chunk, how many tokens lie within each of LEVELS distances of the row's best, and their mass
    collect   the tokens down to the first level that has enough for top-k or top-p: the row's list, in order of ids
    choose    one program a row: the best; or the token at the row's uniform number among its list, or among all
    search    as ``choose``, over the vocabulary, for rows of more tokens than a list takes; others leave at once

Bisection over the bits of a token's order finds how much is enough, and where top-k and top-p end. The k-th token
is found by count, the nucleus by mass. Masses are exact sums (``draw_math.py``), so all ways give the same token, and a
row's token does not depend on the batch. A search reads each token ORDER_BITS times, 100 times as often as a list does.
It is for flat distributions.

The token is written where the next step looks for it, and counted for penalties. A batch is filled up by rows of -1.

Shapes: N rows of the batch, V vocabulary, S chunks, R rows of the table, M places of edits, L levels + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .draw_choice import choose, search
from .draw_levels import LEVELS, collect, find_best, measure
from .row_table import RowTable

CHUNK = 2048
LIST = 4096


@dataclass(frozen=True, slots=True)
class SamplerWork:
    """Memory that one batch's launches hand on to each other, at addresses that stay; nothing of it outlives them."""

    best: Tensor
    """[N, S] int64: orders."""
    counts: Tensor
    """[N, L, S] int64"""
    masses: Tensor
    """[N, L, S] int64"""
    lists: Tensor
    """[N, LIST] int64: orders."""
    chunk: int


def make_work(
    rows: int, vocab_size: int, device: torch.device, *, chunk: int = CHUNK, listed: int = LIST
) -> SamplerWork:
    """Allocate the kernels' working memory for batches of up to ``rows`` rows.

    ``chunk``: tokens of the vocabulary for each program. ``listed``: tokens of a row's list. Both are powers of two,
    and change speed but no chosen token.
    """
    chunks = triton.cdiv(vocab_size, chunk)
    levels = (rows, LEVELS.value + 1, chunks)
    return SamplerWork(
        best=torch.empty((rows, chunks), dtype=torch.int64, device=device),
        counts=torch.empty(levels, dtype=torch.int64, device=device),
        masses=torch.empty(levels, dtype=torch.int64, device=device),
        lists=torch.empty((rows, listed), dtype=torch.int64, device=device),
        chunk=chunk,
    )


def sample(
    logits: Tensor,
    table: RowTable,
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    finite: Tensor,
    work: SamplerWork,
    *,
    draws: bool = True,
) -> None:
    """Queue the choice of the token at ``positions[i]`` of the request in row ``rows[i]``, from ``logits[i]``.

    ``logits``: [N, V] of float32, bfloat16 or float16, elements of a row side by side; left as they are. ``rows``,
    ``positions``: [N] int64; a row of -1 is skipped, and no other row is there twice. ``tokens`` ([N] int64) and
    ``finite`` ([N] bool) are written. A row is finite if its edited logits hold no NaN and no +inf, and not only -inf.
    The token of any other row means nothing. ``draws``: False if the host knows that all rows are greedy.
    """
    count, vocab = logits.shape
    if count == 0:
        return
    chunks, chunk = work.best.shape[1], work.chunk
    padded, listed = triton.next_power_of_2(chunks), work.lists.shape[1]
    row_args = (logits, logits.stride(0), table.words, table.counts, table.biases, rows, positions, vocab)
    found = (work.best, work.counts, work.masses, work.lists)
    find_best[(count, chunks)](*row_args, work.best, chunks, CHUNK=chunk, num_warps=8)
    if draws:
        measure[(count, chunks)](*row_args, *found[:3], chunks, CHUNK=chunk, CHUNKS=padded, num_warps=8)
        collect[(count, chunks)](*row_args, *found, chunks, CHUNK=chunk, CHUNKS=padded, LIST=listed, num_warps=8)
    sizes = {"CHUNK": chunk, "CHUNKS": padded, "LIST": listed}
    chosen = (table.last_tokens, tokens, finite)
    choose[(count,)](*row_args, *found, *chosen, chunks, DRAWS=draws, **sizes, num_warps=16 if draws else 4)
    if draws:
        search[(count,)](*row_args, *found[:3], *chosen, chunks, **sizes, num_warps=8)
