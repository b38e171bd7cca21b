"""What computes the passes of a loaded model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..batch.host_batch import HostBatch
from ..kv.pools import Pools
from ..sampling.row_params import F32
from ..sampling.sampled import HostSampler
from ..steps.common_steps import ALL_GENERAL, CommonSteps, RequestTables


class Engine(ABC):
    """Computes passes of one model over its KV pools, from one thread. Only the pools change.

    Life: made → any number of passes. Between passes the weights may be dropped, and loaded again.
    """

    attention_backend: str
    """Name of the attention backend; "cpu" is the C++ engine."""
    graph_sizes: tuple[int, ...] = ()
    """Entries of decode steps to capture as graphs, ascending; empty: no step is captured."""
    step_weight_bytes: int
    """Bytes of weights that a decode step of one token reads."""
    sampler: HostSampler
    """Chooses tokens from logits on the host."""

    def __init__(self, pools: Pools, *, clears_begun_pages: bool) -> None:
        """Compute over ``pools``.

        ``clears_begun_pages``: whether to zero the pages that a pass begins and does not fill. Attention reads whole
        pages and masks the positions beyond a row's end. A NaN that a former owner left there would get through the
        mask, as 0 × NaN is NaN.
        """
        self._pools = pools
        self._clears = clears_begun_pages

    @abstractmethod
    def host_logits(self, batch: HostBatch) -> F32:
        """Compute a pass, write its KV to the pool, and return the logits at ``batch.logit_indices``, [L, V].

        The result lies on the host.
        """

    def common_steps(self, tables: RequestTables) -> CommonSteps:
        """Return an object that computes a whole step in one call if the step wants sampled tokens alone.

        ``tables``: request table and rows' state, which it reads and writes. It uses the current weights. This default
        returns ``ALL_GENERAL``, with which the executor computes every step part by part.
        """
        return ALL_GENERAL

    def weight_bytes_read(self) -> int:
        """Return the bytes of weights that the last pass read. This default returns 0: they are not counted."""
        return 0

    @abstractmethod
    def drop_weights(self) -> None:
        """Free the weights and what computes with them. The caller has to drop what ``common_steps`` returned.

        Raises ``UnsupportedModel`` if the engine keeps its weights.
        """

    @abstractmethod
    def take_weights(self) -> None:
        """Load the weights again, after ``drop_weights``.

        Raises ``ModelError`` if that fails, or if the files have other weights now.
        """


class WithoutWeights(RuntimeError):
    """A pass was asked for while the weights are not there."""

    def __init__(self) -> None:
        super().__init__("a pass was asked for while the weights are not there")
