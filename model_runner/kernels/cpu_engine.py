"""A loaded model on the CPU kernels: its weights, packed.

They may be dropped afterwards, but for the embedding table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.progress import ProgressLog
from ..kv_pool import MHATokenToKVPool
from ..layers.linear import Linear
from ..layers.rotary import RotaryEmbedding
from ..loader.quantized_blocks import HEAD_NAMES, BlockSource
from ..models.decoder import Decoder, Layer
from .native_engine import LinearKind, NativeEngine, NormKind, Ranks
from .rope_tables import RopeTables
from .structs import WeightPart
from .team import Team

log = logging.getLogger(__name__)

DENSE = 0
"""``Format::kDense`` of linear.h."""


class CpuEngine(NativeEngine):
    """The engine of ``model``, over ``pool``. Raises ``BuildError`` where the kernels can't be had.

    Linear layers take their weights from ``blocks`` where it has them, and from the model elsewhere.
    """

    def __init__(
        self,
        model: Decoder,
        pool: MHATokenToKVPool,
        team: Team,
        blocks: BlockSource | None = None,
        ranks: Ranks | None = None,
        window_pool: MHATokenToKVPool | None = None,
    ) -> None:
        """``ranks``: whom it computes the model with, of which ``model``, ``pool`` and ``blocks`` are its own part.
        ``window_pool``: see ``NativeEngine``.
        """
        spec, cpu = model.spec, torch.device("cpu")
        ropes = [RotaryEmbedding(rope, spec.head_dim, dtype=torch.float32, device=cpu) for rope in spec.ropes]
        tables = RopeTables(ropes, spec.head_dim)
        super().__init__(spec, model.embed_tokens.dtype, tables, pool, team, ranks, window_pool)
        self._blocks = blocks
        self.weight_bytes = 0
        """What the linear layers' weights take, as a decode step reads them."""
        self._pack(model)
        # The blocks are packed; the source may hold a whole file.
        self._blocks = None

    def _pack(self, model: Decoder) -> None:
        # The head counts as a layer.
        progress = ProgressLog(log, "packing the weights", len(model.layers) + 1)
        for i, layer in enumerate(model.layers):
            attention, mlp = layer.attention, layer.mlp
            self._pack_linear(LinearKind.QKV, i, attention.qkv_proj, "q_proj", "k_proj", "v_proj")
            self._pack_linear(LinearKind.O, i, attention.o_proj, "o_proj")
            self._pack_linear(LinearKind.GATE_UP, i, mlp.gate_up_proj, "gate_proj", "up_proj")
            self._pack_linear(LinearKind.DOWN, i, mlp.down_proj, "down_proj")
            for kind, weight in _norms_of(layer).items():
                self.set_norm(kind, i, weight)
            progress.advance(1)
        self.set_norm(NormKind.FINAL, 0, model.norm.scale)
        self._pack_weight(LinearKind.HEAD, 0, model.lm_head, None, HEAD_NAMES[:1])
        self.set_embedding(model.embed_tokens)

    def _pack_linear(self, kind: LinearKind, layer: int, linear: Linear, *parts: str) -> None:
        names = [f"layers.{layer}.{part}.weight" for part in parts]
        self._pack_weight(kind, layer, linear.weight, linear.bias, names)

    def _pack_weight(
        self, kind: LinearKind, layer: int, weight: Tensor, bias: Tensor | None, names: Sequence[str]
    ) -> None:
        rows = weight.contiguous()
        found = None if self._blocks is None else self._blocks.find(names, weight)
        if found is None:
            parts = [WeightPart(rows.data_ptr(), rows.shape[0], DENSE)]
        else:
            parts = [WeightPart(part.blocks.ctypes.data, len(part.blocks), int(part.format)) for part in found]
        wide = int(weight.dtype == torch.bfloat16)
        for part in parts:
            self.weight_bytes += self._library.pds_packed_bytes(wide, part.format, part.rows, rows.shape[1])
        if not self.set_linear(kind, layer, parts, bias):
            raise ValueError(f"{', '.join(names)} can't be multiplied with together")


def _norms_of(layer: Layer) -> dict[NormKind, Tensor]:
    norms = {
        NormKind.BEFORE_ATTENTION: layer.before_attention,
        NormKind.AFTER_ATTENTION: layer.after_attention,
        NormKind.BEFORE_MLP: layer.before_mlp,
        NormKind.AFTER_MLP: layer.after_mlp,
        NormKind.Q: layer.attention.q_norm,
        NormKind.K: layer.attention.k_norm,
    }
    return {kind: norm.scale for kind, norm in norms.items() if norm is not None}
