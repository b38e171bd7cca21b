"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from ...model_files.spec import AttentionSpec, MLASpec, ModelSpec
from ..batch.forward_batch import ForwardBatch


class AttentionLimits(NamedTuple):
    """What a backend makes room for before the first pass, so that nothing moves afterwards.

    ``heads``: of queries, of every layer. ``windows``: those that layers have, in tokens; layers without aside.
    ``max_entries``: rows that decode at a time. ``context_length``: tokens of a row.
    """

    heads: int
    windows: tuple[int, ...]
    max_entries: int
    context_length: int


def attention_limits(spec: ModelSpec, max_entries: int, context_length: int) -> AttentionLimits:
    """Return the limits that an attention backend makes room for, with up to ``max_entries`` decoding rows.

    ``context_length``: maximum tokens of a row.
    """
    attentions = [layer.attention for layer in spec.layers]
    windows = {a.window for a in attentions if isinstance(a, AttentionSpec) and a.window is not None}
    return AttentionLimits(
        max(attention.heads for attention in attentions), tuple(sorted(windows)), max_entries, context_length
    )


class AttentionBackend(ABC):
    """Causal attention of a pass's tokens over their rows' KV: ``plan`` once a pass, then ``forward`` once a layer.

    ``is_graph_safe``: whether it keeps ``ForwardBatch.is_captured``. ``reads_whole_pages``: whether what lies behind a
    row's end must be finite numbers (which it multiplies with 0). ``gathered_tokens``: tokens of decodes' contexts that
    are copied at a time, or one context if it is longer; 0: contexts are read in the pool.
    """

    is_graph_safe: ClassVar[bool] = False
    reads_whole_pages: ClassVar[bool] = False
    gathered_tokens: ClassVar[int] = 0

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare all that the layers of the pass ``batch`` share, before ``forward`` for each layer.

        The request table is read now, and not kept.
        """

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
        """Write ``k`` and ``v`` [T, KV heads, head_dim] into the pool, and return the attention of ``q``.

        ``q``: [T, heads, head_dim]. Each token sees its row's KV up to and including its own position, within the
        window of the layer's ``spec``. ``sinks`` (float32 [heads]): see ``AttentionSpec.sinks``. With latent attention,
        ``k`` are the latent rows, ``v`` the beginning of each, and ``q`` what rows are multiplied by. The result is [T,
        heads * elements of a value].
        """
