"""What the native model must know of a checkpoint, whichever file said it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import UnsupportedModel


class RopeType(StrEnum):
    """How rotary frequencies depart from the plain ones."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency, and the stretch of the context if there is one.

    ``freq_factors`` (head_dim / 2 values, or none) divide the frequencies one by one: how a GGUF file spells llama3.
    """

    theta: float = 10000.0
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyper-parameters of a Llama-family model. ``context_length`` is the longest sequence, in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise UnsupportedModel(
                f"{self.num_heads} heads can't share {self.num_kv_heads} KV heads, or head_dim {self.head_dim} is odd"
            )


def choose_context_length(config: ModelConfig, wanted: int | None) -> int:
    """Longest sequence to serve, in tokens: ``wanted`` if the model can; raises ``UnsupportedModel``."""
    if wanted is None:
        return config.context_length
    if not 0 < wanted <= config.context_length:
        raise UnsupportedModel(
            f"--context-length {wanted} is not within the model's own limit, {config.context_length} tokens"
        )
    return wanted
