"""Engines on an attention backend; of them, the torch engine: a native model, layer by layer."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..attention.base import attention_limits
from ..attention.group_pools import group_pools
from ..attention.registry import BackendNeeds, make_attention_backend
from ..batch.forward_batch import ForwardBatch, tensor_batch
from ..batch.host_batch import HostBatch
from ..batch.step_plan import begun_tokens
from ..device.base import Device
from ..kv.pools import Pools
from ..loader.weight_loader import Weights
from ..models.decoder import Decoder, LayerForward
from ..options import WorkerOptions
from ..sampling.row_params import F32
from ..sampling.rules import TorchRules
from ..steps.decode_graphs import graph_sizes, why_no_graphs
from .base import Engine, WithoutWeights

log = logging.getLogger(__name__)

WrapLayer = Callable[[int, LayerForward], LayerForward]


class AttentionEngine(Engine):
    """Computes a model of torch's layers, with an attention backend over the pools."""

    logits_dtype: torch.dtype = torch.float32
    """Type of the logits that ``compute`` returns."""
    scores_later = False
    """Whether ``compute`` hands ``ForwardBatch.scored`` what computes logits after the pass."""

    def __init__(self, backend: str, needs: BackendNeeds, pools: Pools, options: WorkerOptions) -> None:
        """Make the attention backend of the name ``backend`` from ``needs``, to compute over ``pools``.

        Pages that a pass begins are cleared if the backend reads whole pages, or if the instance hands them over.
        """
        self._attention = attention = make_attention_backend(backend, needs)
        super().__init__(pools, clears_begun_pages=options.hands_over or attention.reads_whole_pages)
        self.attention_backend = backend
        self.sampler = TorchRules()
        self._groups = group_pools(pools.tensors)
        self._meet: Callable[[], None] = meet_alone
        """Return when the ranks that share the pool have come."""

    @property
    def gathered_tokens(self) -> int:
        """``gathered_tokens`` of the attention backend."""
        return self._attention.gathered_tokens

    def host_logits(self, batch: HostBatch) -> F32:
        """Compute the pass on CPU tensors that share the batch's memory, write its KV, and return the wanted logits."""
        return self.forward(tensor_batch(batch)).numpy()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a pass, write its KV to the pool, and return the wanted logits, [L, V] float32."""
        with torch.inference_mode():
            self.prepare(batch)
            return self.compute(batch).float()

    def prepare(self, batch: ForwardBatch) -> None:
        """Clear the pages that the pass begins, if necessary, and plan its attention; once before each ``compute``.

        This depends on more than the batch's tensors, so no graph captures it.
        """
        if self._clears:
            self._clear_begun_pages(batch)
        self._attention.plan(batch)

    @abstractmethod
    def compute(self, batch: ForwardBatch) -> Tensor:
        """Compute the prepared pass, write its KV, and return the wanted logits, [L, V] of ``logits_dtype``.

        If ``graph_sizes`` has any, a graph can capture this.
        """

    def _clear_begun_pages(self, batch: ForwardBatch) -> None:
        begun_at, size = batch.begun_at, self._pools.page_size
        if begun_at is None:
            begun_at = torch.from_numpy(begun_tokens(np.array(batch.starts), np.array(batch.q_lens), size))
            begun_at = begun_at.to(batch.out_cache_loc.device)
        pages = batch.out_cache_loc[begun_at] // size
        for group in self._groups:
            group.pool.clear(group.pages(batch, pages).to(torch.int64))
        # A rank that is late must not clear what another one has written.
        self._meet()

    def _choose_graphs(self, sizes: tuple[int, ...], options: WorkerOptions, device: Device, model: object) -> None:
        why_not = why_no_graphs(options, device, model, self._attention.is_graph_safe)
        if why_not is None:
            self.graph_sizes = sizes
        elif device.can_capture:
            log.info("decode steps run without CUDA graphs: %s", why_not)


class TorchEngine(AttentionEngine):
    """Computes ``models/decoder.py``, on any device."""

    scores_later = True

    def __init__(
        self,
        weights: Weights,
        pools: Pools,
        backend: str,
        device: Device,
        options: WorkerOptions,
        context_length: int,
        reload: Callable[[], Weights],
        *,
        shares_heads: bool = False,
        wrap_layer: WrapLayer | None = None,
    ) -> None:
        """Compute a native model of these ``weights``, with the attention backend of the name ``backend``.

        ``reload`` loads the same weights again. ``shares_heads``: whether other ranks write the same keys and values to
        the pool. ``wrap_layer``: for ``Decoder.wrap_layers``; None: layers are not wrapped.
        """
        model, rows = weights.model, options.max_running_requests
        sizes = graph_sizes(rows, options.graph_sizes, options.cuda_graph_max_bs)
        needs = BackendNeeds(
            pools.tensors,
            weights.dtype,
            attention_limits(model.spec, rows, context_length),
            device,
            [layer.attention for layer in model.spec.layers],
            -(-context_length // pools.page_size) * max(sizes, default=0),
            options.flashinfer_workspace_size,
            options,
        )
        super().__init__(backend, needs, pools, options)
        self.logits_dtype = model.logits_dtype
        self.step_weight_bytes = weights.nbytes - model.idle_bytes
        self._reload = reload
        self._shares_heads = shares_heads
        self._wrap_layer = wrap_layer
        self._compute: Callable[[ForwardBatch], Tensor] = without_weights
        self._use(model)
        self._choose_graphs(sizes, options, device, model)

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Run the decoder over the prepared pass. Raises ``WithoutWeights`` while the weights are dropped."""
        return self._compute(batch)

    def drop_weights(self) -> None:
        """Drop the decoder and its weights. Later passes raise ``WithoutWeights``."""
        self._compute, self._meet = without_weights, meet_alone

    def take_weights(self) -> None:
        """Load the weights again, after ``drop_weights``, into a new decoder, and compute with it from now on."""
        self._use(self._reload().model)

    def _use(self, model: Decoder) -> None:
        attention = self._attention
        if self._shares_heads:
            self._meet = model.ranks.meet
        if self._wrap_layer is not None:
            model.wrap_layers(self._wrap_layer)
        self._compute = lambda batch: model.forward(batch, attention)


def without_weights(_batch: ForwardBatch) -> Tensor:
    """Raise ``WithoutWeights``: stands for the model while its weights are dropped."""
    raise WithoutWeights


def meet_alone() -> None:
    """Return at once: no other rank shares the pool."""
