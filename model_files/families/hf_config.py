"""A Hugging Face config.json, as the families read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedModel, not_negative, whole
from ..packing import read_packing
from ..spec import Activation, AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec
from .hf_rope import read_rope, stretched_context
from .hf_values import HFValues

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
MLP_BIAS = frozenset({"llama", "deepseek_v2", "granite", "smollm3"})
"""Families that have ``mlp_bias`` in transformers; in others a null changes nothing."""
ATTENTION_BIAS = frozenset(
    {"llama", "glm", "glm4", "gpt_oss", "granite", "olmo2", "olmo3", "smollm3"}
    | {"gemma2", "gemma3_text", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
)
"""Families that have ``attention_bias`` in transformers; in others a null changes nothing."""
CLAMPED_GAIN = 1.702
"""Gain of the sigmoid in the network of ``ExpertsSpec.limit``."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm", "qk_layernorm", "is_encoder_decoder"), (None, False)),
    **dict.fromkeys(("use_bidirectional_attention", "rope_interleaved", "lm_head_bias"), (None, False)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "sliding_window"), (None,)),
    **dict.fromkeys(("attention_chunk_size", "layer_types", "no_rope_layers", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"), (None, 0)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (None, 1.0)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "partial_rotary_factor", "rotary_pct"), (None, 1.0)),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None, CLAMPED_GAIN),
    "is_causal": (None, True),
    "transformers_weights": (None,),
    "text_config": (None, {}),
    "quantization_config": (None, {}),
}
"""Keys that change what is computed, and what they say where they change nothing."""


class HFConfig(HFValues):
    """The parts of a plain decoder as the config has them; a family changes what is different.

    Methods raise ``UnsupportedModel``, or for a broken config what ``HFValues`` raises.
    """

    def norm(self, offset: float = 0.0) -> NormSpec:
        """Read the norm that all layers use. ``offset``: what the family adds to the weights of its norms."""
        key = "rms_norm_eps"
        return NormSpec(eps=not_negative(key, self.number(key, 1e-6)), offset=offset)

    def attention(self) -> AttentionSpec:
        """Read the plain attention of a layer: one rope, no window. ``attention_bias`` is for all projections."""
        bias = self.flag("attention_bias", nullable=self.family not in ATTENTION_BIAS)
        return AttentionSpec(
            heads=self.heads,
            kv_heads=whole(self.get("num_key_value_heads") or self.heads),
            head_dim=self.head_dim,
            scale=float(self.head_dim**-0.5),
            qkv_bias=bias,
            o_bias=bias,
        )

    def activation(self, key: str = "hidden_act") -> Activation:
        """Read the activation that ``key`` names; silu if it is missing."""
        self.get(key)
        name = self.raw.get(key, "silu")
        if name not in ACTIVATIONS:
            raise UnsupportedModel(f"{key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def mlp(self, activation: str = "hidden_act") -> MLPSpec:
        """Read the MLP of a layer. ``activation`` is the key that names its activation."""
        return MLPSpec(
            inner=self.integer("intermediate_size"),
            activation=self.activation(activation),
            bias=self.flag("mlp_bias", nullable=self.family not in MLP_BIAS),
        )

    def experts(self, inner: str = "intermediate_size") -> ExpertsSpec:
        """Read the plain experts of a layer: a softmax over the chosen ones, no biases, no shared expert.

        ``inner``: the key of their size. Their number is ``num_experts`` or, if that is missing, ``num_local_experts``.
        """
        older = self.get("num_experts")
        return ExpertsSpec(
            count=self.integer("num_local_experts") if older is None else whole(older),
            chosen=self.integer("num_experts_per_tok"),
            inner=self.integer(inner),
            activation=self.activation(),
        )

    def rope(self, **changes: Any) -> RopeSpec:
        """Read a rope of the model.

        ``changes``: keyword arguments of ``read_rope``, such as the type of layers or a default.
        """
        return read_rope(self, **changes)

    def slides(self, default: Sequence[bool]) -> list[bool]:
        """Return for each layer whether it has a sliding window: as ``layer_types`` says, or as ``default`` without it.

        Raises ``UnsupportedModel`` if ``layer_types`` has other types or too few layers.
        """
        types = self.get("layer_types")
        if types is None:
            return list(default)
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown or len(types) < self.num_layers:
            raise UnsupportedModel(f"layer_types {', '.join(unknown) or 'of fewer layers'} are not supported")
        return [name == "sliding_attention" for name in types[: self.num_layers]]

    def window(self, *, is_used: bool = True) -> int | None:
        """Return ``sliding_window`` in tokens; None if it is missing, null or not used.

        ``AttentionSpec`` refuses a window below 1.
        """
        stated = self.get("sliding_window")
        return whole(stated) if is_used and stated is not None else None

    def windows(self, default: Sequence[bool], *, are_used: bool = True) -> list[int | None]:
        """Return each layer's window in tokens, None for a layer without.

        ``default``: whether each layer has one if the config lacks ``layer_types``. ``are_used``: False if the config
        switches windows off.
        """
        window = self.window(is_used=are_used)
        stated = self.get("sliding_window")
        if window is None and "sliding_attention" in (self.get("layer_types") or ()):
            raise UnsupportedModel(
                f"layer_types has sliding_attention, but sliding_window {stated} is not used; take "
                "it out of layer_types, or state sliding_window and use_sliding_window"
            )
        return [window if slides else None for slides in self.slides(default)]

    def model(self, layers: Sequence[LayerSpec], *ropes: RopeSpec, **fields: Any) -> ModelSpec:
        """Make the model of ``layers`` and ``ropes``.

        ``fields``: further fields of ``ModelSpec``, at least ``tensors``. Raises ``UnsupportedModel`` if the config has
        a key that changes the computation, but that the family has not read.
        """
        spec = ModelSpec(
            family=self.family,
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            layers=tuple(layers),
            ropes=ropes,
            context_length=stretched_context(self.integer("max_position_embeddings"), ropes),
            tied_head=self.flag("tie_word_embeddings"),
            **{"final_norm": self.norm(), **fields},
        )
        self._refuse_unread()
        return spec

    def _refuse_unread(self) -> None:
        quantised = self.raw.get("quantization_config")
        if quantised and "quantization_config" not in self.read:
            if isinstance(why_not := read_packing(quantised), str):
                raise UnsupportedModel(
                    f"quantised safetensors ({why_not}) are not supported; take the plain model, or a GGUF of it"
                )
            self.read.add("quantization_config")
        for key, neutral in NEUTRAL.items():
            value = self.raw.get(key)
            if key not in self.read and value not in neutral and not _is_all_full(value):
                raise UnsupportedModel(f"{key} {value!r} is not supported for a {self.family!r} model")


def _is_all_full(value: object) -> bool:
    return isinstance(value, list) and set(value) == {"full_attention"}
