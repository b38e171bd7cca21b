"""Graphs of decode steps: a pass of one token of each of S requests, captured once and replayed.

A pass of a small batch is hundreds of kernels of a few microseconds each, more than a host can launch in that time. A
graph launches them all at once, and does the same to the same addresses each time. So a step of B tokens takes the
smallest graph with S >= B. Its other tokens are padding: token 0 at position 0, written to slot 0, which no request
has. What changes from step to step lies in arrays that stay. They are those of the step (``step_arrays.py``) and of the
attention backend's ``plan``.

Call ``capture`` once, after the warm-up. It captures the largest graph first, so what a smaller one needs in between
fits into the memory of the larger. Then call ``run`` for each decode step that ``size_for`` has a size for. Any other
step is computed without a graph.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..batch.forward_batch import ForwardBatch
from ..device.base import Device, Graph
from ..errors import NotEnoughMemory
from ..models.decoder import Decoder
from ..models.group import alone
from ..options import WorkerOptions

log = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4)
DEFAULT_MOST = 256
"""Entries of the largest graph where the options don't say: beyond, the launches are hidden by the work."""


class GraphModel(Protocol):
    """What is captured: ``compute`` alone. ``prepare`` goes before each replay."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Do the host's part of a pass over ``batch``, which no graph replays: plan attention from lengths and rows."""
        ...

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Compute a pass, and return the logits at ``batch.logit_indices``: [L, V], of the same dtype in every call."""
        ...


def graph_sizes(most_running: int, given: Iterable[int] = (), most: int | None = None) -> tuple[int, ...]:
    """Return the sizes of decode graphs to capture, in entries, ascending, none above ``most_running`` requests.

    They are the ``given`` sizes, if there are any. Otherwise they go up to ``most`` (default ``DEFAULT_MOST``): the
    powers of two to 4, the multiples of 8 to 128 and of 16 beyond, and the largest itself.
    """
    if sizes := set(given):
        return tuple(sorted(size for size in sizes if size <= most_running))
    largest = min(most_running, most or DEFAULT_MOST)
    sizes = {*FIRST_SIZES, *range(8, 129, 8), *range(144, largest + 1, 16), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def size_for(sizes: tuple[int, ...], count: int) -> int | None:
    """Return the smallest of the ascending ``sizes`` that is at least ``count`` entries, or None if all are smaller."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def why_no_graphs(options: WorkerOptions, device: Device, model: object, is_safe: bool) -> str | None:
    """Return why decode steps of ``model`` run without graphs, or None if they can be captured.

    ``is_safe``: whether the model's attention can be captured.
    """
    if options.disable_cuda_graph:
        return "--disable-cuda-graph"
    if not device.can_capture:
        return f"{device.kind} has none"
    if not is_safe:
        return "the attention backend can't be captured"
    if not isinstance(model, Decoder):
        return "a model by transformers' own class may wait for the device"
    if model.ranks is not alone and options.cuda_graph_bs is None and options.cuda_graph_max_bs is None:
        return (
            "with --tp-size they hold NCCL's exchanges, which has not been tried on GPUs yet: --cuda-graph-max-bs or "
            "--cuda-graph-bs asks for them"
        )
    return model.why_no_graphs


class _Captured(NamedTuple):
    """A graph, and the batch that it reads: a graph knows addresses and keeps no tensor alive."""

    graph: Graph[Tensor]
    batch: ForwardBatch


class DecodeGraphs:
    """Graphs of ``sizes``; none before ``capture``."""

    def __init__(self, device: Device, model: GraphModel, sizes: tuple[int, ...]) -> None:
        self._device = device
        self._model = model
        self._sizes = sizes
        self._graphs: dict[int, _Captured] = {}
        self._logits: Tensor | None = None
        """[S, V] of the largest size: where every graph leaves its logits. Each with logits of its own would keep a
        gigabyte, as a graph's output is no memory that others may use in between.
        """

    def capture(self, batch_of: Callable[[int], ForwardBatch]) -> None:
        """Capture a graph of every size now, the largest first.

        ``batch_of(size)`` returns a batch of ``size`` padding entries; each call with a size uses the same tensors.
        Raises ``NotEnoughMemory``, and drops all graphs, if the device's memory does not suffice.
        """
        begin = time.monotonic()
        for size in reversed(self._sizes):
            try:
                self._graphs[size] = self._capture(batch_of(size))
            except torch.OutOfMemoryError as e:
                self.drop()
                raise NotEnoughMemory(
                    f"the CUDA graph of {size} decodes does not fit into the GPU's memory: lower --cuda-graph-max-bs, "
                    f"--mem-fraction-static or --max-total-tokens, or set --disable-cuda-graph ({e})"
                ) from None
        log.info("captured %d graphs of decode steps in %.1f s", len(self._graphs), time.monotonic() - begin)

    def _capture(self, batch: ForwardBatch) -> _Captured:
        self._model.prepare(batch)
        # Whatever is compiled, tuned or allocated at first use must be so before.
        logits_SV = self._model.compute(batch)
        if self._logits is None:
            self._logits = torch.empty_like(logits_SV)
        return _Captured(self._device.capture(partial(self._compute, batch, self._logits[: len(logits_SV)])), batch)

    def _compute(self, batch: ForwardBatch, out_SV: Tensor) -> Tensor:
        return out_SV.copy_(self._model.compute(batch))

    def size_for(self, count: int) -> int | None:
        """Return the size that a step of ``count`` entries is padded to.

        Return None if it is computed without a graph: it is too large, or nothing is captured.
        """
        return size_for(self._sizes, count) if self._graphs else None

    def run(self, batch: ForwardBatch) -> Tensor:
        """Queue the replay of the graph for ``batch`` and return the logits of all entries, [S, V], padding included.

        ``batch`` has a captured size S, over the tensors that the graph was captured with. The logits are overwritten
        when any graph runs again.
        """
        self._model.prepare(batch)
        graph = self._graphs[len(batch.q_lens)].graph
        graph.replay()
        return graph.output

    def drop(self) -> None:
        """Forget the graphs and free their memory; ``size_for`` then returns None until the next ``capture``."""
        self._graphs.clear()
        self._logits = None
        self._device.forget_graphs()
