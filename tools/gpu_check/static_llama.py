"""A Llama in plain torch with a static KV cache, for ``torch.compile``: decode steps of one row, as gpt-fast has them.

Weights are random. Shapes: T tokens, which is 1; H heads, K KV heads, D head_dim, C columns of the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        hidden, inner, self.dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norm, self.second_norm = (nn.RMSNorm(hidden, eps=config["rms_norm_eps"]) for _ in range(2))
        # Buffers have addresses that stay, so a captured graph may write to them.
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.kv_heads, columns, self.dim))

    def forward(self, x: Tensor, position: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        sizes = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(1, 1, -1, self.dim).transpose(1, 2) for part in self.qkv(self.norm(x)).split(sizes, -1))
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(1, -1))
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class StaticLlama(nn.Module):
    """``config``: the fields of config.json that name sizes. ``columns``: tokens that the cache has room for."""

    cos: Tensor
    sin: Tensor
    columns: Tensor

    def __init__(self, config: dict[str, Any], columns: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(_Layer(config, columns) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.head.weight = self.embedding.weight
        frequencies = config["rope_theta"] ** (-torch.arange(0, config["head_dim"], 2) / config["head_dim"])
        angles = torch.arange(columns)[:, None] * frequencies.repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("columns", torch.arange(columns))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the likeliest token [1] after ``token`` [1] at ``position`` [1], and store its KV in the cache."""
        x = self.embedding(token)
        rotation = self.cos.index_select(0, position), self.sin.index_select(0, position)
        mask = (self.columns <= position).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, position, rotation, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits.argmax(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin
