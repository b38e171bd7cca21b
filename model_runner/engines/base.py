"""What computes the passes of a loaded model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..attention.group_pools import group_pools
from ..batch.forward_batch import ForwardBatch
from ..batch.step_plan import begun_tokens
from ..kv.pools import Pools
from ..steps.common_steps import ALL_GENERAL, CommonSteps, RequestTables

if TYPE_CHECKING:
    from ..sampling.native import NativeSampler


class Engine(ABC):
    """Computes passes of one model over its KV pools, from one thread. Only the pools change.

    Life: made → any number of passes. Between passes the weights may be dropped, and loaded again.
    """

    attention_backend: str
    """Name of the attention backend; "cpu" is the C++ engine."""
    logits_dtype: torch.dtype = torch.float32
    """Type of the logits that ``compute`` returns."""
    graph_sizes: tuple[int, ...] = ()
    """Entries of decode steps to capture as graphs, ascending; empty: no step is captured."""
    step_weight_bytes: int
    """Bytes of weights that a decode step of one token reads."""
    sampler: NativeSampler | None = None
    """Chooses tokens on the CPU's vector units; None: operations of torch choose."""

    def __init__(self, pools: Pools, *, clears_begun_pages: bool) -> None:
        """Compute over ``pools``. ``clears_begun_pages``: zero the pages that a pass begins and does not fill."""
        self._pools = pools
        self._groups = group_pools(pools.by_group)
        self._clears = clears_begun_pages
        self._meet: Callable[[], None] = meet_alone
        """Return when the ranks that share the pool have come."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the logits of ``batch.logit_indices``, [L, V] float32; write the pass's KV to the pool."""
        with torch.inference_mode():
            self.prepare(batch)
            return self.compute(batch).float()

    def prepare(self, batch: ForwardBatch) -> None:
        """Do the half of ``forward`` that depends on more than the batch's tensors: once before each ``compute``."""
        if self._clears:
            self._clear_begun_pages(batch)

    @abstractmethod
    def compute(self, batch: ForwardBatch) -> Tensor:
        """Do the other half, which can be captured if ``graph_sizes`` has any; logits of ``logits_dtype``."""

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        """Return what computes common steps over ``tables``, with the weights that are loaded now."""
        return ALL_GENERAL

    def weight_bytes_read(self) -> int:
        """Return the bytes of weights that the last pass read; 0 if the engine does not count them."""
        return 0

    @abstractmethod
    def drop_weights(self) -> None:
        """Give the weights back, with what computes with them. Anything from ``common_steps`` must be dropped, too.

        Raises ``UnsupportedModel`` if the engine keeps its weights.
        """

    @abstractmethod
    def take_weights(self) -> None:
        """Load the weights again, as at the start.

        Raises ``ModelError`` if that fails, or if the files hold other weights now.
        """

    def _clear_begun_pages(self, batch: ForwardBatch) -> None:
        """Clear the pages that this pass begins and does not fill: write zeros.

        Attention reads whole pages and masks the lanes beyond a row's end. A NaN that a former owner left there would
        get through the mask, as 0 × NaN is NaN.
        """
        begun_at, size = batch.begun_at, self._pools.page_size
        if begun_at is None:
            begun_at = torch.from_numpy(begun_tokens(np.array(batch.starts), np.array(batch.q_lens), size))
            begun_at = begun_at.to(batch.out_cache_loc.device)
        if not len(begun_at):
            return
        pages = batch.out_cache_loc[begun_at] // size
        for group in self._groups:
            group.pool.clear(group.pages(batch, pages).to(torch.int64))
        # A rank that is late must not clear what another one has written.
        self._meet()


def without_weights(_batch: ForwardBatch) -> Tensor:
    """Raise ``RuntimeError``: stands for the model while its weights are dropped."""
    raise RuntimeError("a pass was asked for while the weights are not there")


def meet_alone() -> None:
    """Return at once: no other rank shares the pool."""
