"""The metadata of a GGUF file, as the families read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gguf

from ..errors import InvalidWeights, UnsupportedModel, not_negative, positive, whole
from ..gguf_reader import GGUFFile
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Pairing,
    RopeSpec,
    RopeType,
    Stack,
    checked_layers,
)
from ..tensor_names import GGUF_LAYER

ROPE_TYPES = {
    "none": RopeType.DEFAULT,
    "linear": RopeType.LINEAR,
    "yarn": RopeType.YARN,
    "longrope": RopeType.LONGROPE,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "attention.clamp_kqv", "attention.max_alibi_bias", "rope.scaling.alpha"), (0,)),
    **dict.fromkeys(("nextn_predict_layers", "attention.kv_lora_rank", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "attention.scale"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_gating_func", "moe_every_n_layers"), (0, 1)),
    **dict.fromkeys(("expert_shared_count", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.temperature_length", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (0, 1)),
    "attention.sliding_window_pattern": (0,),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "attention.causal": (True,),
}
"""Keys that change what is computed, and what they say where they change nothing."""


class GGUFConfig:
    """The values of the file's architecture by key. What is asked for is remembered, like in ``HFConfig``.

    Methods raise ``UnsupportedModel`` or, for a key that must be there, ``KeyError``.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.family = str(file.metadata.get("general.architecture"))
        start = f"{self.family}."
        self._meta = {k.removeprefix(start): v for k, v in file.metadata.items() if k.startswith(start)}
        self._read: set[str] = set()
        self.last_key = ""
        """Key that was asked for last, which an error is most likely about."""

    def get(self, key: str) -> Any:
        """Return the value of ``key``, None if it is missing, and mark the key as read."""
        self._read.add(key)
        self.last_key = key
        return self._meta.get(key)

    def integer(self, key: str) -> int:
        """Return the integer of ``key``, and mark the key as read. A list must have one value for all layers.

        Raises ``KeyError`` if the key is missing.
        """
        self._read.add(key)
        self.last_key = key
        value = self._meta[key]
        if isinstance(value, Sequence):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{key} that differs from layer to layer is not supported")
            value = value[0]
        return whole(value)

    def number(self, key: str, default: float) -> float:
        """Return the value of ``key``, ``default`` if it is missing, and mark the key as read."""
        value = self.get(key)
        return default if value is None else float(value)

    def positive(self, key: str, default: float) -> float:
        """Return the finite value above 0 of ``key``, ``default`` if it is missing, and mark the key as read.

        Raises ``UnsupportedModel`` for a value out of bounds.
        """
        return positive(key, self.number(key, default))

    def slides(self, period: int) -> list[bool]:
        """Return for each layer whether it has a sliding window.

        ``attention.sliding_window_pattern`` is a list of that, or a period: only the last layer of each has no window.
        With 0, every layer has one, as in llama.cpp. ``period``: what counts if the key is missing.
        """
        key, layers = "attention.sliding_window_pattern", self.num_layers
        pattern = self.get(key)
        if isinstance(pattern, list):
            if len(pattern) < layers:
                raise UnsupportedModel(f"{key} of {len(pattern)} layers is not supported: there are {layers}")
            return [bool(slides) for slides in pattern[:layers]]
        stated = period if pattern is None else whole(pattern)
        if stated < 0:
            raise UnsupportedModel(f"{key} {stated} is not supported: it must be 0 at least")
        return [stated == 0 or (i + 1) % stated != 0 for i in range(layers)]

    def has(self, name: str) -> bool:
        """Return whether the file has the tensor ``name``."""
        return name in self._file.tensors

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return checked_layers("block_count", self.integer("block_count"))

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.integer("attention.head_count")

    @property
    def head_dim(self) -> int:
        """Return the number of elements of a head.

        Raises ``UnsupportedModel`` if keys and values have different ones.
        """
        head_dim = whole(self.get("attention.key_length") or self.integer("embedding_length") // self.heads)
        if (self.get("attention.value_length") or head_dim) != head_dim:
            raise UnsupportedModel("keys and values of different sizes are not supported")
        return head_dim

    def norm(self) -> NormSpec:
        """Read the norm that all layers use.

        It has no offset, because a file's weights contain the family's already. Raises ``KeyError`` if the file does
        not state its epsilon.
        """
        key = "attention.layer_norm_rms_epsilon"
        if self.get(key) is None:
            raise KeyError(key)
        return NormSpec(eps=not_negative(key, self.number(key, 0.0)))

    def attention(self) -> AttentionSpec:
        """Read the plain attention of a layer: one rope, no window. The file's first layer decides about biases."""
        kv_heads = self.integer("attention.head_count_kv") if self.get("attention.head_count_kv") else self.heads
        return AttentionSpec(
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            scale=float(self.head_dim**-0.5),
            qkv_bias=self.has("blk.0.attn_q.bias") or self.has("blk.0.attn_qkv.bias"),
            o_bias=self.has("blk.0.attn_output.bias"),
        )

    def mlp(self) -> MLPSpec:
        """Read the MLP of a layer."""
        return MLPSpec(inner=self.integer("feed_forward_length"), bias=self.has("blk.0.ffn_up.bias"))

    def experts(self, inner: str = "expert_feed_forward_length", *, normalised: bool = True) -> ExpertsSpec:
        """Read the plain experts of a layer.

        ``inner``: the key of their size. ``normalised``: whether the chosen experts' weights are, if the file does not
        say.
        """
        given = self.get("expert_weights_norm")
        return ExpertsSpec(
            count=self.integer("expert_count"),
            chosen=self.integer("expert_used_count"),
            inner=self.integer(inner),
            bias=self.has("blk.0.ffn_up_exps.bias"),
            normalised=normalised if given is None else bool(given),
            # Nought is llama.cpp's word for none.
            weight_scale=self.number("expert_weights_scale", 0.0) or 1.0,
            router_bias=self.has("blk.0.ffn_gate_inp.bias"),
        )

    def rope(self, pairing: Pairing = Pairing.HALVES) -> RopeSpec:
        """Read the rope of the layers that see the whole context."""
        context = self.integer("context_length")
        # Nought is llama.cpp's word for none.
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)) or 1.0
        positive("rope.scaling.factor", factor)
        # Like llama.cpp: a factor without a type is a linear one.
        name = str(self.get("rope.scaling.type") or ("none" if factor == 1.0 else "linear"))
        if name not in ROPE_TYPES:
            raise UnsupportedModel(f"rotary scaling {name!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        original = "rope.scaling.original_context_length"
        short, long = self._factors("rope_factors_short.weight"), self._factors("rope_factors_long.weight")
        if bool(short) != bool(long):
            raise UnsupportedModel("rope_factors of short contexts alone, or of long ones, are not supported")
        # Files of longrope tell it by their tensors alone.
        kind = RopeType.LONGROPE if short or long else ROPE_TYPES[name]
        return RopeSpec(
            rotary_dim=whole(self.get("rope.dimension_count") or self.head_dim),
            theta=self.positive("rope.freq_base", 10000.0),
            pairing=pairing,
            type=kind,
            factor=factor,
            # Nought stands for none here, too.
            original_context=int(positive(original, self.number(original, 0.0) or context)),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=self._attention_factor(kind),
            freq_factors=short or self._factors("rope_freqs.weight"),
            long_factors=long,
        )

    def model(
        self,
        layers: Sequence[LayerSpec],
        *ropes: RopeSpec,
        tensors: Mapping[str, tuple[str, ...] | Stack] = GGUF_LAYER,
        **fields: Any,
    ) -> ModelSpec:
        """Make the model of ``layers`` and ``ropes``.

        ``tensors``: our tensors for each name in the file. ``fields``: further fields of ``ModelSpec``. Raises
        ``UnsupportedModel`` if the file has a key that changes the computation, but that the family has not read.
        """
        spec = ModelSpec(
            family=self.family,
            vocab_size=self._table_rows(),
            hidden_size=self.integer("embedding_length"),
            layers=tuple(layers),
            final_norm=self.norm(),
            ropes=ropes,
            context_length=self.integer("context_length"),
            tied_head=not self.has("output.weight"),
            tensors=tensors,
            **fields,
        )
        # Layers with a window have the rope of the others, unless the family reads one of their own.
        for key, neutral in (NEUTRAL | {"rope.freq_base_swa": (self._meta.get("rope.freq_base"),)}).items():
            if key not in self._read and key in self._meta and self._meta[key] not in neutral:
                raise UnsupportedModel(f"{self.family}.{key} {self._meta[key]!r} is not supported for this family")
        return spec

    def _table_rows(self) -> int:
        """Return the number of rows of the embedding table, which may be padded beyond the vocabulary.

        Raises ``InvalidWeights`` if the table is missing, or has fewer rows than there are tokens.
        """
        table = self._file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise InvalidWeights(f"{self._file.path} holds no matrix 'token_embd.weight'; download or convert it again")
        rows, tokens = int(table.shape[1]), self._file.vocabulary_size
        if tokens > rows:
            raise InvalidWeights(
                f"{self._file.path} lists {tokens} tokens, but has {rows} embeddings; convert it again"
            )
        return rows

    def _factors(self, name: str) -> tuple[float, ...]:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return ()
        return tuple(gguf.dequantize(tensor.data, tensor.tensor_type).ravel().tolist())

    def _attention_factor(self, kind: RopeType) -> float | None:
        given = self.get("rope.scaling.attn_factor")
        if given is not None and kind not in (RopeType.LONGROPE, RopeType.DEFAULT) and given != 1:
            raise UnsupportedModel(f"rope.scaling.attn_factor {given} with {kind} scaling is not supported")
        return float(given) if given is not None and kind == RopeType.LONGROPE else None
