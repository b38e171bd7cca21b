"""Reads ``ModelConfig`` from a Hugging Face folder's config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from .config import ModelConfig, RopeConfig, RopeType
from .errors import UnsupportedModel
from .families import Family, find_family

log = logging.getLogger(__name__)


def read_hf_config(folder: Path) -> ModelConfig:
    """The config in ``folder``; raises ``UnsupportedModel``."""
    file = folder / "config.json"
    try:
        raw = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        family = find_family(raw.get("model_type", "(none)"))
        _refuse_unsupported(raw)
        return _to_config(raw, family)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as e:
        raise UnsupportedModel(f"{file} is no usable model config: {e.__class__.__name__}: {e}") from e


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantised safetensors are not supported; take the plain model, or a GGUF of it")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {raw['hidden_act']!r} is not supported, only 'silu'")


def _to_config(raw: dict[str, Any], family: Family) -> ModelConfig:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    attention_bias = bool(raw.get("attention_bias", False))
    rope, context = _rope(raw)
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        context_length=_limit_to_window(raw, family, context),
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
    )


def _limit_to_window(raw: dict[str, Any], family: Family, context: int) -> int:
    """Sliding-window attention equals full attention up to the window: serve no more than that."""
    window = raw.get("sliding_window")
    if not window or not (family.windowed or raw.get("use_sliding_window")) or window >= context:
        return context
    log.warning("the model slides a window of %d tokens; the context is limited to that", window)
    return int(window)


def _rope(raw: dict[str, Any]) -> tuple[RopeConfig, int]:
    """Rotary parameters (older files: ``rope_theta``, ``rope_scaling``; newer: ``rope_parameters``) and the context."""
    params: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    context = int(raw["max_position_embeddings"])
    name = params.get("rope_type", params.get("type", "default"))
    if name not in list(RopeType):
        raise UnsupportedModel(f"rotary scaling {name!r} is not supported; supported are {', '.join(RopeType)}")
    if params.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("rotary embedding of a part of each head is not supported")
    if name == RopeType.YARN and (
        params.get("mscale") or params.get("mscale_all_dim") or params.get("truncate") is False
    ):
        raise UnsupportedModel("this variant of yarn scaling (mscale, truncate) is not supported")
    factor = float(params.get("factor") or 1.0)
    original = int(params.get("original_max_position_embeddings") or context)
    rope = RopeConfig(
        theta=float(params.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        type=RopeType(name),
        factor=factor,
        original_context=original,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=params.get("attention_factor"),
    )
    # Files that ask for yarn state the trained length; the stretched one is what they mean to serve.
    return rope, max(context, int(original * factor)) if name == RopeType.YARN else context
