"""The tensors of one forward pass, as a torch engine takes them.

Shapes: T tokens, B entries, L wanted rows of logits, R rows of the request table, C its width in tokens, P pages of the
pool with page 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...runtime.layers_done import NOT_COUNTED, PassProgress
from .host_batch import HostBatch
from .scored_logits import SCORES_NOTHING, ScoresLater
from .tensor_hidden import READS_NOTHING, ReadsHidden, host_reader


@dataclass(slots=True)
class ForwardBatch:
    """One pass: entry ``b`` computes ``q_lens[b]`` tokens of row ``rows[b]`` from position ``starts[b]`` on.

    The entries' tokens lie one after another in ``input_ids``, ``positions`` and ``out_cache_loc``. Prefill chunks and
    decode steps (``q_lens[b]`` 1) mix freely. ``req_to_token`` must already map this pass's positions to
    ``out_cache_loc``, and a row's pages must be whole: position ``p`` lives at offset ``p % page_size`` of its page.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: position of each token in its request."""
    out_cache_loc: Tensor
    """[T] int64: slots that the pass writes."""
    rows: Tensor
    """[B] int64: rows of ``req_to_token``."""
    starts: list[int]
    """[B]: tokens of the row with computed KV."""
    q_lens: list[int]
    """[B]: tokens of the row that this pass computes, at least 1."""
    req_to_token: Tensor
    """[R, C] int32: row × position → slot. Never written by the model."""
    logit_indices: Tensor
    """[L] int64: indices into T of the tokens with wanted logits, in the order of the answer."""
    done: PassProgress = NOT_COUNTED
    """Counts the layers with KV that the pass has written, for the push of their pages; host memory only."""
    prompt_lens: list[int] | None = None
    """[B]: of each entry's row, how many tokens are the request's prompt: those behind were generated, also where they
    are computed once more. None: entries of one token are generated ones, longer ones a prompt's.
    """
    window_pages: Tensor | None = None
    """[P] int32: a page → the page of the pool of windowed layers that holds the same tokens, 0: none; on the tokens'
    device. None where no layers have a pool of their own. Pages that any of the pass's tokens sees, or writes, have
    one.
    """
    begun_at: Tensor | None = None
    """int64: tokens that lie in pages which the pass begins and does not fill, one of each; None: not worked out."""
    host_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[B]: ``rows``, on the host, for planning there. Empty if the batch was not made of a step."""
    is_captured: bool = False
    """Whether the pass is a graph's, captured or replayed.

    Each entry is then of one token, and the tensors are the same each time. What ``plan`` leaves for ``forward`` must
    be at the same addresses for each pass of as many entries.
    """
    hidden: ReadsHidden = READS_NOTHING
    """Reader of the hidden states that are wanted besides logits."""
    scored: ScoresLater = SCORES_NOTHING
    """Holder of the logits that are wanted after the pass, besides those at ``logit_indices``."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pass computes, of all entries together (T)."""
        return self.input_ids.shape[0]

    def on_host(self) -> HostBatch:
        """Return this batch as NumPy arrays that share the tensors' memory. All tensors must lie in host memory.

        ``starts``, ``q_lens`` and ``prompt_lens`` are copied from lists.
        """
        return HostBatch(
            input_ids=self.input_ids.numpy(),
            positions=self.positions.numpy(),
            out_cache_loc=self.out_cache_loc.numpy(),
            rows=self.rows.numpy(),
            starts=np.array(self.starts, dtype=np.int64),
            q_lens=np.array(self.q_lens, dtype=np.int64),
            req_to_token=self.req_to_token.numpy(),
            logit_indices=self.logit_indices.numpy(),
            done=self.done,
            prompt_lens=None if self.prompt_lens is None else np.array(self.prompt_lens, dtype=np.int64),
            begun_at=None if self.begun_at is None else self.begun_at.numpy(),
            window_pages=None if self.window_pages is None else self.window_pages.numpy(),
        )


def tensor_batch(batch: HostBatch) -> ForwardBatch:
    """Return ``batch`` as CPU tensors for a torch engine. They share the arrays' memory; lists are copies."""
    put = torch.from_numpy
    return ForwardBatch(
        input_ids=put(batch.input_ids),
        positions=put(batch.positions),
        out_cache_loc=put(batch.out_cache_loc),
        rows=put(batch.rows),
        starts=batch.starts.tolist(),
        q_lens=batch.q_lens.tolist(),
        req_to_token=put(batch.req_to_token),
        logit_indices=put(batch.logit_indices),
        done=batch.done,
        prompt_lens=None if batch.prompt_lens is None else batch.prompt_lens.tolist(),
        window_pages=None if batch.window_pages is None else put(batch.window_pages),
        begun_at=None if batch.begun_at is None else put(batch.begun_at),
        host_rows=batch.rows,
        hidden=host_reader(batch.hidden),
    )
