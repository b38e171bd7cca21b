"""Log-probabilities of the chosen token and the best ones, ties by the lower id, as ``logprobs.py`` computes them.

They are those of the model's own distribution, before biases, penalties and temperature. Each chunk of a row gives its
best tokens and the sum of its exponentials. One program for each row joins them in the order of the chunks. The chunks
depend on the vocabulary alone, so a row's result does not depend on the batch.

Shapes: N rows, V vocabulary, S chunks, K best tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_math import id_of, is_above_numbers, logit_of, order_of

_CHUNK = 4096
MAX_BEST = 64
"""More alternatives than this are for the host to find."""


@dataclass(frozen=True, slots=True)
class LogprobWork:
    """Memory between two launches, at addresses that stay."""

    best: Tensor
    """[N, S, K] int64: orders."""
    largest: Tensor
    """[N, S] float32"""
    sums: Tensor
    """[N, S] float32"""


def make_logprob_work(rows: int, vocab_size: int, best: int, device: torch.device, chunk: int = _CHUNK) -> LogprobWork:
    """Allocate the kernels' working memory for up to ``rows`` rows with up to ``best`` alternatives each.

    ``chunk``: tokens of the vocabulary for each program. Raises ``ValueError`` for more than ``MAX_BEST`` alternatives.
    """
    if best > MAX_BEST:
        raise ValueError(f"{best} alternatives are more than {MAX_BEST}")
    chunks = triton.cdiv(vocab_size, chunk)
    return LogprobWork(
        best=torch.empty((rows, chunks, max(best, 1)), dtype=torch.int64, device=device),
        largest=torch.empty((rows, chunks), dtype=torch.float32, device=device),
        sums=torch.empty((rows, chunks), dtype=torch.float32, device=device),
    )


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    chosen: Tensor,
    best_ids: Tensor,
    best: Tensor,
    work: LogprobWork,
    chunk: int = _CHUNK,
) -> None:
    """Queue writing to ``chosen`` ([N] float32) the log-probability of each row's ``targets`` ([N] int64).

    ``logits``: [N, V], elements of a row side by side. ``best_ids`` ([N, K] int64) and ``best`` ([N, K] float32) get
    the K likeliest tokens, best first, and their log-probabilities. If K is more than V, the rest means nothing. A row
    with NaN or +inf has NaN. ``chunk`` is that of ``work``.
    """
    count, vocab = logits.shape
    if count == 0:
        return
    chunks, num = work.largest.shape[1], best_ids.shape[1]
    wide, padded = work.best.shape[2], triton.next_power_of_2(chunks)
    _chunk_best[(count, chunks)](
        logits, logits.stride(0), vocab, work.best, work.largest, work.sums, chunks, num, wide, CHUNK=chunk, num_warps=8
    )
    _join_chunks[(count,)](
        logits,
        logits.stride(0),
        targets,
        work.best,
        work.largest,
        work.sums,
        chunks,
        chosen,
        best_ids,
        best,
        num,
        wide,
        CHUNKS=padded,
        BEST=triton.next_power_of_2(chunks * wide),
    )


@triton.jit(do_not_specialize=["num"])
def _chunk_best(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    best_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    chunks: tl.tensor,
    num: tl.tensor,
    wide: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    i, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + i * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    orders = tl.where(ids < vocab, order_of(logits, ids), -1)
    best = tl.max(orders, 0)
    is_bad = is_above_numbers(best)
    # What is infinite is not subtracted: the difference to itself is NaN, in chunks that are all -inf, too.
    largest = tl.maximum(tl.where(is_bad, 0.0, logit_of(best)), -3.0e38)
    total = tl.sum(tl.exp(tl.minimum(logits - largest, 0.0)), 0)
    tl.store(largest_ptr + i * chunks + chunk, largest)
    tl.store(sums_ptr + i * chunks + chunk, tl.where(is_bad, float("nan"), total))
    for k in range(num):
        tl.store(best_ptr + (i * chunks + chunk) * wide + k, best)
        orders = tl.where(orders == best, -1, orders)
        best = tl.max(orders, 0)


@triton.jit(do_not_specialize=["num"])
def _join_chunks(
    logits_ptr: tl.tensor,
    stride: tl.tensor,
    targets_ptr: tl.tensor,
    best_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    chunks: tl.tensor,
    chosen_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    best_logprobs_ptr: tl.tensor,
    num: tl.tensor,
    wide: tl.tensor,
    CHUNKS: tl.constexpr,
    BEST: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    of_chunk = tl.load(largest_ptr + i * chunks + at, mask=at < chunks, other=-3.0e38)
    sums = tl.load(sums_ptr + i * chunks + at, mask=at < chunks, other=0.0)
    largest = tl.max(of_chunk, 0)
    total = tl.log(tl.sum(sums * tl.exp(of_chunk - largest), 0))
    target = tl.load(logits_ptr + i * stride + tl.load(targets_ptr + i)).to(tl.float32)
    tl.store(chosen_ptr + i, target - largest - total)
    every = tl.arange(0, BEST)
    is_in = (every < chunks * wide) & (every % wide < num)
    orders = tl.load(best_ptr + i * chunks * wide + every, mask=is_in, other=-1)
    for k in range(num):
        best = tl.max(orders, 0)
        tl.store(best_ids_ptr + i * num + k, id_of(best))
        tl.store(best_logprobs_ptr + i * num + k, logit_of(best) - largest - total)
        orders = tl.where(orders == best, -1, orders)
