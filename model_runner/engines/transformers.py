"""The engine for models that transformers' own class computes (``--model-impl``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model_files.errors import UnsupportedModel
from ..attention.registry import BackendNeeds
from ..batch.forward_batch import ForwardBatch
from ..device.base import Device
from ..kv.pools import Pools
from ..models.transformers.model import TransformersModel
from ..options import WorkerOptions
from ..steps.decode_graphs import graph_sizes
from .torch import AttentionEngine


class TransformersEngine(AttentionEngine):
    """Computes a transformers model on the torch attention backend. It keeps its weights, and captures no steps."""

    def __init__(
        self,
        model: TransformersModel,
        weight_bytes: int,
        pools: Pools,
        device: Device,
        dtype: torch.dtype,
        options: WorkerOptions,
    ) -> None:
        needs = BackendNeeds(pools.tensors, dtype, device=device, options=options)
        super().__init__("torch", needs, pools, options)
        self._model = model
        self.step_weight_bytes = weight_bytes
        self._choose_graphs(graph_sizes(options.max_running_requests), options, device, model)

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Run transformers' own model class over the prepared pass, with attention by this engine's backend."""
        return self._model.forward(batch, self._attention)

    def drop_weights(self) -> None:
        """Raise ``UnsupportedModel``: a model of transformers' own class keeps its weights."""
        raise UnsupportedModel("a model by transformers' own class (--model-impl) keeps its weights")

    def take_weights(self) -> None:
        """Raise ``UnsupportedModel``: the weights are never dropped, so there is nothing to load again."""
        raise UnsupportedModel("a model by transformers' own class (--model-impl) keeps its weights")
