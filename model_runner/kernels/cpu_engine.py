"""A loaded model on the CPU kernels: its weights, packed. It may be dropped then, but for the embedding table."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...model_files.config import ModelConfig
from ...model_files.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, QKNorm, RopeSpec
from ...runtime.progress import ProgressLog
from ..kv_pool import MHATokenToKVPool
from ..layers.linear import Linear
from ..layers.rotary import RotaryEmbedding
from ..loader.quantized_blocks import HEAD_NAMES, BlockSource
from ..models.llama import LlamaForCausalLM, LlamaLayer
from . import lowering
from .native_engine import LinearKind, NativeEngine, NormKind
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
        self, model: LlamaForCausalLM, pool: MHATokenToKVPool, team: Team, blocks: BlockSource | None = None
    ) -> None:
        super().__init__(_spec_of(model.config), model.embed_tokens.dtype, _ropes_of(model.config), pool, team)
        self._blocks = blocks
        self.weight_bytes = 0
        """What the linear layers' weights take, as a decode step reads them."""
        self._pack(model)
        # The blocks are packed; the source may hold a whole file.
        self._blocks = None

    def _pack(self, model: LlamaForCausalLM) -> None:
        # The head counts as a layer.
        progress = ProgressLog(log, "packing the weights", len(model.layers) + 1)
        for i, layer in enumerate(model.layers):
            attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{i}"
            qkv = [f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"]
            self._pack_linear(LinearKind.QKV, i, attention.qkv_proj, qkv)
            self._pack_linear(LinearKind.O, i, attention.o_proj, [f"{prefix}.self_attn.o_proj.weight"])
            gate_up = [f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")]
            self._pack_linear(LinearKind.GATE_UP, i, mlp.gate_up_proj, gate_up)
            self._pack_linear(LinearKind.DOWN, i, mlp.down_proj, [f"{prefix}.mlp.down_proj.weight"])
            for kind, weight in _norms_of(layer).items():
                self.set_norm(kind, i, weight)
            progress.advance(1)
        self.set_norm(NormKind.FINAL, 0, model.norm.weight)
        self._pack_weight(LinearKind.HEAD, 0, model.lm_head, None, HEAD_NAMES[:1])
        self.set_embedding(model.embed_tokens)

    def _pack_linear(self, kind: LinearKind, layer: int, linear: Linear, names: Sequence[str]) -> None:
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


# --- until models are made of a ModelSpec, what stands for theirs ---


def refusal(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the kernels can't run this model; None if they can."""
    return lowering.refusal(_spec_of(config), dtype, kv_dtype)


def _spec_of(config: ModelConfig) -> ModelSpec:
    norm = NormSpec(eps=config.rms_norm_eps)
    attention = AttentionSpec(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm=QKNorm.HEAD if config.qk_norm else None,
        qk_norm_spec=norm if config.qk_norm else None,
    )
    mlp = MLPSpec(inner=config.intermediate_size, bias=config.mlp_bias)
    layer = LayerSpec(attention=attention, mlp=mlp, before_attention=norm, before_mlp=norm)
    return ModelSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=(layer,) * config.num_layers,
        final_norm=norm,
        ropes=(RopeSpec(rotary_dim=config.head_dim),),
        context_length=config.context_length,
        tied_head=config.tie_word_embeddings,
    )


def _ropes_of(config: ModelConfig) -> RopeTables:
    rope = RotaryEmbedding(config.rope, config.head_dim, dtype=torch.float32, device=torch.device("cpu"))
    return RopeTables([rope], config.head_dim)


def _norms_of(layer: LlamaLayer) -> dict[NormKind, Tensor]:
    norms = {
        NormKind.BEFORE_ATTENTION: layer.attention_norm,
        NormKind.BEFORE_MLP: layer.mlp_norm,
        NormKind.Q: layer.attention.q_norm,
        NormKind.K: layer.attention.k_norm,
    }
    return {kind: norm.weight for kind, norm in norms.items() if norm is not None}
