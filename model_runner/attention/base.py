"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from ...model_files.spec import AttentionSpec, MLASpec
from ..forward_batch import ForwardBatch


class AttentionBackend(ABC):
    """Causal attention of a pass's tokens over their rows' KV: ``plan`` once a pass, then ``forward`` once a layer.

    ``is_graph_safe``: whether it keeps ``ForwardBatch.is_captured``. ``reads_whole_pages``: whether what lies behind a
    row's end must be finite numbers (which it multiplies with 0).
    """

    is_graph_safe: ClassVar[bool] = False
    reads_whole_pages: ClassVar[bool] = False

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare the pass ``batch``: everything that its layers share. Reads the request table, does not keep it."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | MLASpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store ``k`` and ``v`` [T, KV heads, head_dim] into the pool, then attend with ``q`` [T, heads, head_dim].

        Each token sees its row's KV up to and including its own position, within the window of the layer's ``spec``.
        ``sinks`` (float32 [heads]): see ``AttentionSpec.sinks``. Of latent attention ``k`` are the rows and ``v`` the
        beginning of each, and ``q`` is what they are multiplied with. Returns [T, heads * elements of a value].
        """
