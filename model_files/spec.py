"""What a model is, whichever file said it: the one description that every engine reads.

A decoder: the embedding, layers, a last norm and the head. Of a layer, with ``x`` the residual:

    a = attention(before_attention(x));  x += residual_scale · after_attention(a)
    m = mlp(before_mlp(x));              x += residual_scale · after_mlp(m)

A norm that a family does not have is None, and stands for no change. A family (``families/``) makes a ``ModelSpec`` of
its config; engines know fields, and no families. What an engine can't compute it refuses by the field's name.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .errors import UnsupportedModel, positive

MAX_LAYERS = 10_000
"""Layers that a model may have, many times those of the deepest published one."""


def _require_sizes(**sizes: int) -> None:
    """Raise ``UnsupportedModel``, with its name, for a size below 1: engines need at least one of everything."""
    for name, size in sizes.items():
        if size < 1:
            raise UnsupportedModel(f"{name} {size} is not supported: it must be 1 at least")


def checked_layers(key: str, count: int) -> int:
    """Return ``count``, the number of layers that a config has under ``key``.

    Raises ``UnsupportedModel`` above ``MAX_LAYERS``, because their description would fill the memory.
    """
    if count > MAX_LAYERS:
        raise UnsupportedModel(f"{key} {count} is not supported: it can be {MAX_LAYERS} at most")
    return count


class RopeType(StrEnum):
    """How rotary frequencies depart from the plain ones."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


class Pairing(StrEnum):
    """The elements of a head that a checkpoint rotates together.

    Engines only know the first, over whole heads. Loaders put the rows of q and k into that order (``rope_order.py``).
    """

    HALVES = "halves"
    """``i`` and ``i + rotary_dim / 2``."""
    NEIGHBOURS = "neighbours"
    """``2 i`` and ``2 i + 1``."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first ``rotary_dim`` elements of each head: frequencies, and the stretch of the context.

    ``freq_factors`` (rotary_dim / 2 values, or none) divide the frequencies one by one, for longrope, and for llama3 in
    a GGUF. ``long_factors`` replace them if more than ``original_context`` tokens are served. The choice is made once
    (``context_length.py``), because cached keys must not depend on the length of a text. Engines only read
    ``freq_factors``. ``attention_factor`` (None: the type's own) multiplies cosines and sines.
    """

    rotary_dim: int
    theta: float = 10000.0
    pairing: Pairing = Pairing.HALVES
    type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        positive("rope_theta", self.theta)
        positive("factor", self.factor)
        if self.type == RopeType.YARN and self.theta == 1:
            raise UnsupportedModel("rope_theta 1.0 is not supported with yarn: all pairs would turn alike")
        for factors in (self.freq_factors, self.long_factors):
            if len(factors) not in (0, self.rotary_dim // 2):
                raise UnsupportedModel(
                    f"{len(factors)} factors of frequencies for {self.rotary_dim // 2} pairs of a head"
                )
        if self.type == RopeType.LONGROPE and not self.freq_factors:
            raise UnsupportedModel("longrope without short factors is not supported")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Root-mean-square norm: ``x / rms(x) * (weight + offset)``, in float32."""

    eps: float
    offset: float = 0.0


class QKNorm(StrEnum):
    """What of q and k is normalised before it is rotated."""

    HEAD = "head"
    """Each head by itself, with one weight [head_dim] for all."""
    ALL = "all"
    """All heads together, with a weight of their size."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention: softmax(cap(scale · q kᵀ)) v over the tokens up to one's own.

    ``rope``: index into ``ModelSpec.ropes``; None: the layer does not know positions. ``window``: a token sees itself
    and the ``window - 1`` before it; None: all. ``softcap``: cap(s) = softcap · tanh(s / softcap); None: s. ``sinks``:
    each head has a learned score of nothing, which takes its share of the softmax and is neither scaled nor capped.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: int | None = 0
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm | None = None
    qk_norm_spec: NormSpec | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        _require_sizes(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.window is not None:
            _require_sizes(sliding_window=self.window)

    @property
    def attended_dim(self) -> int:
        """Return the number of elements of a head's output."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps one latent row for all heads.

    The row is [norm(c), rope(k)] with c, k = kv_a(x), of ``kv_lora_rank`` and ``qk_rope_head_dim`` elements. A head's
    query is [q, rope(q')] with q, q' = q_b(norm(q_a(x))), of ``qk_nope_head_dim`` and ``qk_rope_head_dim`` elements.
    If ``q_lora_rank`` is None, it is a plain projection of x.

    From each row a head makes a key [k_b c, rope(k)] and a value v_b c of ``v_head_dim`` elements, and attends as in
    ``AttentionSpec``. Engines apply k_bᵀ to queries and v_b to sums of rows instead. With ``a_bias``, q_a and kv_a have
    biases.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    norm: NormSpec
    """Norm of both latents."""
    rope: int = 0
    a_bias: bool = False
    o_bias: bool = False

    def __post_init__(self) -> None:
        _require_sizes(heads=self.heads, kv_lora_rank=self.kv_lora_rank, qk_nope_head_dim=self.qk_nope_head_dim)
        _require_sizes(qk_rope_head_dim=self.qk_rope_head_dim, v_head_dim=self.v_head_dim)
        if self.q_lora_rank is not None:
            _require_sizes(q_lora_rank=self.q_lora_rank)

    @property
    def qk_head_dim(self) -> int:
        """Return the number of elements of a head's query before ``k_b`` is applied: plain and rotated ones."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_heads(self) -> int:
        """Return 1: all heads read the same latent row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Return the number of elements of a token's latent row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attended_dim(self) -> int:
        """Return the number of elements of a head's output."""
        return self.v_head_dim


class Activation(StrEnum):
    """Activation of the gate of a feed-forward network."""

    SILU = "silu"
    GELU = "gelu"
    """GELU with the error function."""
    GELU_TANH = "gelu_tanh"
    """GELU approximated with tanh."""


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """Gated feed-forward network: ``down(activation(gate(x)) * up(x))``."""

    inner: int
    activation: Activation = Activation.SILU
    bias: bool = False

    def __post_init__(self) -> None:
        _require_sizes(inner=self.inner)


class ExpertScoring(StrEnum):
    """What becomes of a router's logits, over all experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(StrEnum):
    """Score by which groups of experts are compared."""

    LARGEST = "largest"
    """The largest score in it."""
    TWO_LARGEST = "two_largest"
    """The sum of the two largest."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Mixture of experts: each token goes through ``chosen`` of ``count`` gated networks, and outputs are added up.

    scores = scoring(router(x)), in float32. The largest scores are chosen, among the ``groups_chosen`` best of
    ``groups`` equal groups; of equal scores, the first. The ``choice_bias`` only counts for this choice. The weights of
    the chosen are their scores, divided by their sum if ``normalised``, times ``weight_scale``. (A softmax over the
    chosen alone is the normalised one.)

    With ``limit``, experts are GPT-OSS's network, ``(up' + 1) * gate' * sigmoid(1.702 gate')`` with
    ``gate' = min(gate, limit)`` and ``up'`` within ±limit. If it is None, they are that of ``MLPSpec``. ``shared`` is a
    network for every token. With ``shared_gate``, its output is multiplied by ``sigmoid(shared_gate · x)``.
    """

    count: int
    chosen: int
    inner: int
    activation: Activation = Activation.SILU
    bias: bool = False
    limit: float | None = None
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    normalised: bool = True
    weight_scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: GroupScore = GroupScore.LARGEST
    shared: MLPSpec | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        _require_sizes(count=self.count, chosen=self.chosen, inner=self.inner)
        _require_sizes(groups=self.groups, groups_chosen=self.groups_chosen)
        if self.groups_chosen > self.groups or self.count % self.groups:
            raise UnsupportedModel(
                f"{self.groups_chosen} of {self.groups} groups of {self.count} experts are no groups"
            )
        size = self.count // self.groups
        if self.chosen > self.groups_chosen * size:
            raise UnsupportedModel(f"{self.chosen} experts can't be chosen of {self.groups_chosen * size}")
        if self.groups > 1 and size < 2 and self.group_score is GroupScore.TWO_LARGEST:
            raise UnsupportedModel(f"{self.groups} groups of one expert can't be compared by their two best")
        if self.limit is not None and not self.limit > 0:
            raise UnsupportedModel(f"a limit of {self.limit} leaves nothing of the experts")
        if self.shared_gate and self.shared is None:
            raise UnsupportedModel("a gate without a shared expert is not supported")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer; see the module."""

    attention: AttentionSpec | MLASpec
    mlp: MLPSpec | ExpertsSpec
    before_attention: NormSpec | None
    before_mlp: NormSpec | None
    after_attention: NormSpec | None = None
    after_mlp: NormSpec | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Stack:
    """A checkpoint's tensor that holds something of all experts of a layer, one after another.

    ``parts``: what of an expert ("gate_proj.weight"), all of one size, below each other or ``interleaved``, row by row.
    ``transposed``: what are rows here are its columns.
    """

    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model. ``context_length`` is the longest sequence, in tokens.

    logits = logit_cap(logit_scale · head(final_norm(x))), from x = embedding_scale · embedding(token). That scale is
    first rounded to the type of the embedding, as in training.
    ``tensors``: by the names that the checkpoint gives to a layer's tensors, which of ours
    (``model_files/tensor_names.py``) lie in each, one below the other. Both are without "weight" and "bias", or both
    whole; an expert's number is a ``*``.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    ropes: tuple[RopeSpec, ...]
    context_length: int
    tied_head: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tensors: Mapping[str, tuple[str, ...] | Stack] = field(default_factory=dict)
    draft_layers: int = 0
    """How many more the checkpoint has behind the last, to predict tokens further ahead: they are not read."""

    def __post_init__(self) -> None:
        _require_sizes(vocab_size=self.vocab_size, hidden_size=self.hidden_size, layers=len(self.layers))
        for layer in self.layers:
            attention = layer.attention
            if isinstance(attention, MLASpec) and attention.qk_rope_head_dim % 2:
                raise UnsupportedModel(f"{attention.qk_rope_head_dim} rotated elements are no pairs")
            if attention.heads % attention.kv_heads or attention.head_dim % 2:
                raise UnsupportedModel(
                    f"{attention.heads} heads can't share {attention.kv_heads} KV heads, "
                    f"or head_dim {attention.head_dim} is odd"
                )
        for rope in self.ropes:
            if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.rotated_dim:
                raise UnsupportedModel(f"{rope.rotary_dim} of {self.rotated_dim} elements can't be rotated in pairs")
        shapes = {(type(a), a.kv_heads, a.head_dim, _rotated(a)) for a in (layer.attention for layer in self.layers)}
        if len(shapes) != 1:
            raise UnsupportedModel("layers whose keys and values have different shapes are not supported")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads, which is the same in every layer."""
        return self.layers[0].attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Number of elements that every layer keeps of a token for each KV head."""
        return self.layers[0].attention.head_dim

    @property
    def rotated_dim(self) -> int:
        """Return how many elements of a head are in rotated pairs. Some of the pairs may turn by an angle of 0."""
        return _rotated(self.layers[0].attention)

    @property
    def latent_dim(self) -> int | None:
        """Return how many elements of a token's latent row are its value, too; None for keys and values by head."""
        attention = self.layers[0].attention
        return attention.kv_lora_rank if isinstance(attention, MLASpec) else None

    @property
    def kv_elements(self) -> int:
        """Return the number of elements, of keys and values together, that each layer stores for a token."""
        return self.num_kv_heads * self.head_dim * (2 if self.latent_dim is None else 1)


def _rotated(attention: AttentionSpec | MLASpec) -> int:
    return attention.qk_rope_head_dim if isinstance(attention, MLASpec) else attention.head_dim
