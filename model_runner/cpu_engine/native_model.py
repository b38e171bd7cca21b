"""A loaded model on the CPU kernels: its weights, packed.

They may be dropped afterwards, but for the embedding table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...runtime.progress import ProgressLog
from ..kv.pool import KVPool
from ..loader.quantized_blocks import HEAD_NAMES, BlockSource
from ..models.decoder import Decoder, Layer
from ..models.experts import Experts
from ..models.latent_attention import LatentAttention
from ..models.mlp import MLP
from ..ops.layers.linear import Linear
from ..ops.layers.rotary import RotaryEmbedding
from .library import ActivationDType
from .native_engine import WHOLE, LinearKind, NativeEngine, NormKind, Ranks, VectorKind
from .rope_tables import RopeTables
from .structs import WeightPart
from .team import Team

log = logging.getLogger(__name__)

DENSE = 0
"""``Format::kDense`` of linear.h."""


class NativeModel(NativeEngine):
    """The engine of ``model``, over ``pools``. Raises ``BuildError`` where the kernels can't be had.

    Linear layers take their weights from ``blocks`` where it has them, and from the model elsewhere.
    """

    def __init__(
        self,
        model: Decoder,
        pools: Sequence[KVPool],
        team: Team,
        blocks: BlockSource | None = None,
        ranks: Ranks = WHOLE,
    ) -> None:
        """``ranks``: tensor-parallel ranks that it computes the model with, of which ``model``, ``pools`` and
        ``blocks`` are its own part.
        """
        spec, cpu = model.spec, torch.device("cpu")
        ropes = [RotaryEmbedding(rope, spec.rotated_dim, dtype=torch.float32, device=cpu) for rope in spec.ropes]
        tables = RopeTables(ropes, spec.rotated_dim)
        activations = ActivationDType.INT16 if blocks is None else ActivationDType[blocks.activations.upper()]
        super().__init__(spec, model.embed_tokens.dtype, tables, pools, team, ranks, activations)
        self._blocks = blocks
        self.weight_bytes = 0
        """What a decode step of one token reads of the linear layers' weights: of experts, those that it chooses."""
        self._pack(model)
        # The blocks are packed; the source may hold a whole file.
        self._blocks = None

    def _pack(self, model: Decoder) -> None:
        # The head counts as a layer.
        progress = ProgressLog(log, "packing the weights", len(model.layers) + 1)
        for i, layer in enumerate(model.layers):
            attention, mlp = layer.attention, layer.mlp
            if isinstance(attention, LatentAttention):
                self._pack_latent(i, attention)
            else:
                self._pack_linear(LinearKind.QKV, i, attention.qkv_proj, "q_proj", "k_proj", "v_proj")
                if attention.sinks is not None:
                    self.set_vector(VectorKind.SINKS, i, attention.sinks)
            self._pack_linear(LinearKind.O, i, attention.o_proj, "o_proj")
            if isinstance(mlp, Experts):
                self._pack_experts(i, mlp)
            else:
                self._pack_mlp(i, mlp)
            for kind, weight in _norms_of(layer).items():
                self.set_norm(kind, i, weight)
            progress.advance(1)
        self.set_norm(NormKind.FINAL, 0, model.norm.scale)
        self.weight_bytes += self._pack_weight(LinearKind.HEAD, 0, model.lm_head, None, HEAD_NAMES[:1])
        self.set_embedding(model.embed_tokens)

    def _pack_latent(self, layer: int, attention: LatentAttention) -> None:
        first = attention.q_b_proj if attention.q_a_proj is None else attention.q_a_proj
        weight = torch.cat((first.weight, attention.kv_a_proj.weight))
        bias = None
        if attention.kv_a_proj.bias is not None:
            # Queries that are projected at once have none.
            above = torch.zeros(len(first.weight)) if first.bias is None else first.bias.float()
            bias = torch.cat((above, attention.kv_a_proj.bias.float()))
        names = ["q_proj" if attention.q_a_proj is None else "q_a_proj", "kv_a_proj"]
        names = [f"layers.{layer}.{name}.weight" for name in names]
        self.weight_bytes += self._pack_weight(LinearKind.QKV, layer, weight, bias, names)
        if attention.q_a_proj is not None:
            self._pack_linear(LinearKind.QB, layer, attention.q_b_proj, "q_b_proj")
        for kind, linear in ((LinearKind.KB, attention.k_b_proj), (LinearKind.VB, attention.v_b_proj)):
            for head, rows in enumerate(linear.weight.chunk(attention.spec.heads)):
                self._pack_dense(kind, layer, rows, head)

    def _pack_dense(self, kind: LinearKind, layer: int, weight: Tensor, head: int) -> None:
        rows = weight.contiguous()
        part = WeightPart(rows.data_ptr(), rows.shape[0], DENSE)
        wide = int(weight.dtype == torch.bfloat16)
        self.weight_bytes += self._library.pds_packed_bytes(wide, part.format, part.rows, rows.shape[1])
        self.set_linear(kind, layer, [part], None, head)

    def _pack_mlp(self, layer: int, mlp: MLP, of: str = "", expert: int = 0) -> None:
        self._pack_linear(LinearKind.GATE_UP, layer, mlp.gate_up_proj, f"{of}gate_proj", f"{of}up_proj", expert=expert)
        self._pack_linear(LinearKind.DOWN, layer, mlp.down_proj, f"{of}down_proj", expert=expert)

    def _pack_experts(self, layer: int, experts: Experts) -> None:
        spec, router, bias = experts.spec, experts.router.weight, experts.router.bias
        if experts.shared_gate is not None:
            router = torch.cat((router, experts.shared_gate))
            bias = None if bias is None else functional.pad(bias, (0, 1))
        self.set_linear(LinearKind.ROUTER, layer, [WeightPart(router.data_ptr(), len(router), DENSE)], bias)
        if experts.choice_bias is not None:
            self.set_vector(VectorKind.CHOICE_BIAS, layer, experts.choice_bias)
        nbytes = 0
        for kind, stack, parts in (
            (LinearKind.GATE_UP, experts.gate_up_proj, ("gate_proj", "up_proj")),
            (LinearKind.DOWN, experts.down_proj, ("down_proj",)),
        ):
            for i, weight in enumerate(stack.weight):
                names = [f"layers.{layer}.experts.{i}.{part}.weight" for part in parts]
                own_bias = None if stack.bias is None else stack.bias[i]
                nbytes += self._pack_weight(kind, layer, weight, own_bias, names, i)
        self.weight_bytes += router.nbytes + nbytes * spec.chosen // spec.count
        if experts.shared is not None:
            self._pack_mlp(layer, experts.shared, "shared.", spec.count)

    def _pack_linear(self, kind: LinearKind, layer: int, linear: Linear, *parts: str, expert: int = 0) -> None:
        names = [f"layers.{layer}.{part}.weight" for part in parts]
        self.weight_bytes += self._pack_weight(kind, layer, linear.weight, linear.bias, names, expert)

    def _pack_weight(
        self, kind: LinearKind, layer: int, weight: Tensor, bias: Tensor | None, names: Sequence[str], expert: int = 0
    ) -> int:
        """The bytes that it takes."""
        rows = weight.contiguous()
        found = None if self._blocks is None else self._blocks.find(names, weight)
        if found is None:
            parts = [WeightPart(rows.data_ptr(), rows.shape[0], DENSE)]
        else:
            parts = [WeightPart(part.blocks.ctypes.data, len(part.blocks), int(part.format)) for part in found]
        if not self.set_linear(kind, layer, parts, bias, expert):
            raise ValueError(f"{', '.join(names)} can't be multiplied with together")
        wide = int(weight.dtype == torch.bfloat16)
        sizes = (self._library.pds_packed_bytes(wide, part.format, part.rows, rows.shape[1]) for part in parts)
        return sum(sizes)


def _norms_of(layer: Layer) -> dict[NormKind, Tensor]:
    attention = layer.attention
    q_norm, k_norm = (
        (attention.q_a_norm, attention.kv_a_norm)
        if isinstance(attention, LatentAttention)
        else (attention.q_norm, attention.k_norm)
    )
    norms = {
        NormKind.BEFORE_ATTENTION: layer.before_attention,
        NormKind.AFTER_ATTENTION: layer.after_attention,
        NormKind.BEFORE_MLP: layer.before_mlp,
        NormKind.AFTER_MLP: layer.after_mlp,
        NormKind.Q: q_norm,
        NormKind.K: k_norm,
    }
    return {kind: norm.scale for kind, norm in norms.items() if norm is not None}
