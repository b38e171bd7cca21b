"""What a step computes, as arrays: pure functions of the message, the same for every device and tested without one.

A step is planned while the device is still busy with the one before, so a token that an earlier step has yet to choose
is not known here. ``last_at`` says where such a token goes, and the device puts it there.

Shapes: T tokens, B entries, S sampled entries, L wanted rows of logits, N pages of all entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.base import I32, unpack_i32
from ...messages.worker import ForwardStep
from .hidden import hidden_tokens

I64 = npt.NDArray[np.int64]


class StepPlan(NamedTuple):
    """A step, unpacked. Sampled entries' logits come first, then those of each ``InputLogprobSpec``."""

    input_ids: I64
    """[T]; 0 where the row's last token goes."""
    positions: I64
    """[T]"""
    out_cache_loc: I64
    """[T]: slots that the pass writes."""
    token_rows: I64
    """[T]: rows of the request table."""
    rows: I64
    """[B]"""
    starts: I64
    """[B]"""
    q_lens: I64
    """[B]"""
    last_at: I64
    """Places among the tokens where a row's last token goes."""
    last_rows: I64
    """Rows that these tokens are the last ones of."""
    logit_indices: I64
    """[L]: tokens with wanted logits."""
    sampled: I64
    """[S]: entries that sample."""
    begun_at: I64
    """Tokens that lie in pages which the step begins and does not fill, one of each page."""
    hidden_tokens: I64
    """[H]: tokens with wanted hidden states, those of one ``ReadoutSpec`` after another."""

    @property
    def is_decode(self) -> bool:
        """Whether a decode graph can compute the step: every entry computes one token, and only logits are wanted."""
        return len(self.input_ids) == len(self.rows) and not len(self.hidden_tokens)

    @property
    def sampled_rows(self) -> I64:
        """Rows of the request table of the entries that sample, [S]."""
        return self.rows[self.sampled]

    @property
    def sampled_positions(self) -> I64:
        """Positions, in their requests, of the tokens to be sampled, [S]."""
        return (self.starts + self.q_lens)[self.sampled]


def plan_step(step: ForwardStep, page_size: int) -> StepPlan:
    """Unpack a step's message into the arrays that executors compute by, for pages of ``page_size`` tokens.

    ``step_check.py`` must have accepted the step.
    """
    rows, starts, q_lens = _i64(step.rows), _i64(step.starts), _i64(step.q_lens)
    ends = np.cumsum(q_lens)
    firsts = ends - q_lens
    input_ids = _i64(step.input_ids)
    use_last = np.flatnonzero(unpack_i32(step.use_last))
    input_ids[firsts[use_last]] = 0
    sampled = sampled_entries(step)
    wanted = [ends[sampled] - 1]
    for spec in step.input_logprobs:
        first = firsts[spec.entry] + spec.first
        wanted.append(np.arange(first, first + len(spec.targets) // 4))
    return StepPlan(
        input_ids=input_ids,
        positions=np.arange(len(input_ids)) + np.repeat(starts - firsts, q_lens),
        out_cache_loc=_i64(step.out_cache_loc),
        token_rows=np.repeat(rows, q_lens),
        rows=rows,
        starts=starts,
        q_lens=q_lens,
        last_at=firsts[use_last],
        last_rows=rows[use_last],
        logit_indices=np.concatenate(wanted),
        sampled=sampled,
        begun_at=begun_tokens(starts, q_lens, page_size),
        hidden_tokens=hidden_tokens(step.readouts, ends, q_lens),
    )


def begun_tokens(starts: I64, q_lens: I64, page_size: int) -> I64:
    """Return indices into the step's tokens, by which an engine finds the new pages that it may have to clear.

    An entry has one if its last page is begun in this step and not filled by it: the index of its last token.
    ``starts``: number of tokens before each entry. ``q_lens``: number of tokens of each entry in this step.
    """
    used = (starts + q_lens) % page_size
    return (np.cumsum(q_lens) - 1)[(used > 0) & (used <= q_lens)]


def sampled_entries(step: ForwardStep) -> I64:
    """Return the indices of the step's entries that sample a token, [S], ascending."""
    return np.flatnonzero(unpack_i32(step.sample))


class PagedIndices(NamedTuple):
    """Places of the entries' keys and values, in the form that paged attention kernels take (FlashInfer's and ours).

    Entry ``b`` reads pages ``[kv_indptr[b], kv_indptr[b + 1])`` of ``kv_indices``, of the last one ``last_page_len[b]``
    tokens. The pages themselves stand in the request table, on the device, where ``kv_indices``
    fetches them without waiting.
    """

    kv_indptr: I32
    """[B + 1]"""
    last_page_len: I32
    """[B]"""

    @property
    def num_pages(self) -> int:
        """Number of pages that all entries read together, a shared page counted for each (N)."""
        return int(self.kv_indptr[-1])


def paged_indices(kv_lens: I64, page_size: int) -> PagedIndices:
    """Return how many pages each entry's attention reads, cumulated, and how many tokens lie in its last page.

    ``kv_lens`` [B], at least 1: tokens that each entry attends to, including those of this step.
    """
    pages = -(-kv_lens // page_size)
    indptr = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(pages)))
    return PagedIndices(indptr.astype(np.int32), ((kv_lens - 1) % page_size + 1).astype(np.int32))


def _i64(data: bytes) -> I64:
    """Return int32 bytes as a writable int64 array."""
    return unpack_i32(data).astype(np.int64)
