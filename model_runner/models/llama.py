"""The Llama family: Llama, Mistral, SmolLM, Qwen2 and Qwen3, told apart by ``ModelConfig`` alone.

Shapes: T tokens, H query heads, K KV heads, D head_dim, N hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model_files.config import ModelConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from ..kernels.reference import linear, rope, silu_and_mul
from ..layers.linear import Linear
from ..layers.rms_norm import RMSNorm
from ..layers.rotary import RotaryEmbedding, Rotation


class LlamaAttention:
    """Grouped-query attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outs = (q_size, kv_size, kv_size)
        self.qkv_proj = Linear(config.hidden_size, outs, bias=config.qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(q_size, (config.hidden_size,), bias=config.o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, x_TN: Tensor, rotation: Rotation, attention: AttentionBackend) -> Tensor:
        """What the layer's attention adds to the residual: [T, N]."""
        qkv = self.qkv_proj.forward(x_TN).view(x_TN.shape[0], -1, self._dim)
        qk, v_TKD = torch.split(qkv, [self._heads + self._kv_heads, self._kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self._heads, self._kv_heads], 1)
            qk = torch.cat((self.q_norm.forward(q), self.k_norm.forward(k)), 1)
        q_THD, k_TKD = torch.split(rope(qk, *rotation), [self._heads, self._kv_heads], 1)
        return self.o_proj.forward(attention.forward(self._layer, q_THD, k_TKD, v_TKD))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The views that take a checkpoint's tensors, by their Hugging Face names."""
        views = self.qkv_proj.weights(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        views |= self.o_proj.weights(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            views |= {f"{prefix}.q_norm.weight": self.q_norm.weight, f"{prefix}.k_norm.weight": self.k_norm.weight}
        return views


class LlamaMLP:
    """Gated feed-forward network of one layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, (inner, inner), bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, (hidden,), bias=bias, dtype=dtype, device=device)

    def forward(self, x_TN: Tensor) -> Tensor:
        """What the layer's network adds to the residual: [T, N]."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(x_TN)))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The views that take a checkpoint's tensors, by their Hugging Face names."""
        return self.gate_up_proj.weights(f"{prefix}.gate_proj", f"{prefix}.up_proj") | self.down_proj.weights(
            f"{prefix}.down_proj"
        )


class LlamaLayer:
    """One decoder layer; normalises before attention and before the network."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        eps = config.rms_norm_eps
        self.attention_norm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, layer, dtype, device)
        self.mlp_norm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.mlp = LlamaMLP(config, dtype, device)

    def forward(self, x_TN: Tensor, rotation: Rotation, attention: AttentionBackend) -> None:
        """Apply the layer to ``x_TN`` in place."""
        x_TN.add_(self.attention.forward(self.attention_norm.forward(x_TN), rotation, attention))
        x_TN.add_(self.mlp.forward(self.mlp_norm.forward(x_TN)))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The views that take a checkpoint's tensors, by their Hugging Face names."""
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.weights(f"{prefix}.self_attn"),
            **self.mlp.weights(f"{prefix}.mlp"),
        }


class LlamaForCausalLM:
    """The model. Its weights are uninitialised until a loader has filled ``weights()``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [LlamaLayer(config, i, dtype, device) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=device)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Logits of ``batch.logit_indices``, [L, V] float32; ``attention`` has planned ``batch``."""
        x_TN = F.embedding(batch.input_ids, self.embed_tokens)
        rotation = self.rotary.forward(batch.positions)
        for i, layer in enumerate(self.layers):
            layer.forward(x_TN, rotation, attention)
            if batch.done is not None and x_TN.device.type == "cpu":
                batch.done.advance(i + 1)
        x_LN = self.norm.forward(x_TN.index_select(0, batch.logit_indices))
        return linear(x_LN, self.lm_head, None).float()

    def weights(self) -> dict[str, Tensor]:
        """The views that take a checkpoint's tensors, by their Hugging Face names."""
        views = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            views |= layer.weights(f"model.layers.{i}")
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self.lm_head
        return views
