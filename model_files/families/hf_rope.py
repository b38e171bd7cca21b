"""Reads the rotary embedding of a Hugging Face config, in its older and its newer spelling.

Older files have ``rope_theta`` and ``rope_scaling`` beside each other, newer ones all in ``rope_parameters``: for the
model, or for each type of its layers. A file with both spellings is read as transformers reads it; docs/models.md has
the table of precedence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..errors import UnsupportedModel, positive, real, unusable
from ..spec import Pairing, RopeSpec, RopeType
from .hf_values import HFValues

ALIASES = {"su": "longrope"}
DYNAMIC = "dynamic"
NO_SCALING: Mapping[str, Any] = MappingProxyType({})


def read_rope(
    config: HFValues,
    *,
    layer_type: str | None = None,
    theta: float = 10000.0,
    partial: float | None = None,
    pairing: Pairing = Pairing.HALVES,
    aliases: Mapping[str, str] = ALIASES,
    scaling: Mapping[str, Any] = NO_SCALING,
) -> RopeSpec:
    """Read the rope of all layers or, if each type of layers has one, that of layers of ``layer_type``.

    ``theta``, ``partial`` (the rotated share of a head) and ``scaling`` are defaults. ``aliases``: other names of types
    of scaling. A family with ``partial`` None rotates whole heads, and a file with another value is refused.
    """
    params = rope_parameters(config, layer_type, scaling)
    name = str(params.get("rope_type") or params.get("type") or "default")
    kind = aliases.get(name, name)
    if kind == DYNAMIC:
        raise UnsupportedModel(
            "rotary scaling 'dynamic' is not supported: cached keys would have to change as their text grows"
        )
    if kind not in list(RopeType):
        raise UnsupportedModel(f"rotary scaling {name!r} is not supported; supported are {', '.join(RopeType)}")
    share = _rotated_share(config, params, partial)
    outer = config.get("rope_theta") if layer_type in (None, "full_attention") else None
    outer_theta = theta if outer is None else real("rope_theta", outer)
    base = positive("rope_theta", rope_number(params, "rope_theta", outer_theta))
    rope = RopeSpec(rotary_dim=_rotary_dim(config, share), theta=base, pairing=pairing)
    if layer_type is None:
        _refuse_lost(config, rope_theta=rope.theta, partial_rotary_factor=share)
    return rope if kind == RopeType.DEFAULT else _scaled(config, params, rope, RopeType(kind), layer_type)


def stretched_context(context: int, ropes: Iterable[RopeSpec]) -> int:
    """Return the context length in tokens: ``context`` or, if that is more, the length that YaRN stretches to.

    Some files with YaRN state only the length of the training.
    """
    stretched = [int(r.original_context * r.factor) for r in ropes if r.type == RopeType.YARN]
    return max(context, *stretched) if stretched else context


def rope_parameters(
    config: HFValues, layer_type: str | None = None, scaling: Mapping[str, Any] = NO_SCALING
) -> dict[str, Any]:
    """Return the config's rope parameters, from its older or newer spelling; a copy.

    ``layer_type``: type of the layers that have this rope; None: all layers. ``scaling``: the default. ``rope_scaling``
    takes the place of ``rope_parameters``. If each type of layers has a rope, it changes that of full attention, key by
    key.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            raise unusable(key, config.get(key), "it must be an object")
    newer, older = config.get("rope_parameters"), config.get("rope_scaling") or {}
    is_nested = any(isinstance(value, dict) for value in (newer or {}).values())
    if newer and is_nested != (layer_type is not None):
        kinds = "apart for each type of layers" if is_nested else "for all layers together"
        raise UnsupportedModel(f"rope_parameters {kinds} are not supported for a {config.family!r} model")
    if layer_type is None:
        return dict(older or (scaling if newer is None else newer))
    own = (newer or {}).get(layer_type) or {}
    return {**own, **(older if layer_type == "full_attention" else {})}


def rope_number(params: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number of ``key`` in a rope's parameters, ``default`` if it is missing or null.

    Raises ``UnsupportedModel``, with the key's name, for what is no number.
    """
    value = params.get(key)
    return default if value is None else real(key, value)


def _refuse_lost(config: HFValues, **kept: float) -> None:
    """Raise ``UnsupportedModel`` if a value of ``rope_parameters`` is lost because ``rope_scaling`` replaces them.

    ``kept``: the values that the model would be computed with, by key. A value is lost if ``rope_scaling`` lacks its
    key and ``kept`` has another value for it.
    """
    older, newer = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for key, value in kept.items():
        lost = newer.get(key)
        if older and key not in older and lost not in (None, value):
            raise UnsupportedModel(
                f"rope_scaling replaces rope_parameters, but lacks its {key} {lost}; add {key} to "
                "rope_scaling, or leave out one of the two"
            )


def _rotated_share(config: HFValues, params: Mapping[str, Any], partial: float | None) -> float:
    key = "partial_rotary_factor"
    if partial is None:
        if (given := params.get(key)) not in (None, 1.0):
            raise UnsupportedModel(f"{key} {given} is not supported for a {config.family!r} model")
        return 1.0
    # Some files have it in both places; the newer one counts.
    older = config.get(key)
    return rope_number(params, key, partial if older is None else real(key, older))


def _rotary_dim(config: HFValues, share: float) -> int:
    size = int(config.head_dim * share)
    if size % 2 or not 0 < size <= config.head_dim:
        raise UnsupportedModel(f"{size} of {config.head_dim} elements of a head can't be rotated in pairs")
    return size


def _scaled(
    config: HFValues, params: Mapping[str, Any], plain: RopeSpec, kind: RopeType, layer_type: str | None
) -> RopeSpec:
    context = config.integer("max_position_embeddings")
    # A rope of one type of layers has its own; transformers does not look beside it.
    outer = config.get("original_max_position_embeddings") if layer_type is None else None
    key = "original_max_position_embeddings"
    stated = rope_number(params, key, context) if outer is None else config.number(key, context)
    original = int(positive(key, int(stated)))
    # A yarn may state that it has no factor; its contexts then say it.
    needs_factor = kind in (RopeType.LINEAR, RopeType.LLAMA3) or (kind == RopeType.YARN and "factor" not in params)
    if needs_factor and params.get("factor") is None:
        raise UnsupportedModel(f"rotary scaling {kind} without a factor is not supported")
    factor = positive("factor", rope_number(params, "factor", context / original))
    short, long = (_factors(params, key, kind) for key in ("short_factor", "long_factor"))
    return replace(
        plain,
        type=kind,
        factor=factor,
        original_context=original,
        low_freq_factor=real("low_freq_factor", params["low_freq_factor"]) if kind == RopeType.LLAMA3 else 1.0,
        high_freq_factor=real("high_freq_factor", params["high_freq_factor"]) if kind == RopeType.LLAMA3 else 4.0,
        beta_fast=positive("beta_fast", rope_number(params, "beta_fast", 0.0) or 32.0),
        beta_slow=positive("beta_slow", rope_number(params, "beta_slow", 0.0) or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=_attention_factor(params, kind, factor, original),
        freq_factors=short,
        long_factors=long,
    )


def _factors(params: Mapping[str, Any], key: str, kind: RopeType) -> tuple[float, ...]:
    """Return longrope's factors of ``key``; none for other types. Raises ``KeyError`` if they are missing."""
    if kind != RopeType.LONGROPE:
        return ()
    factors = params[key]
    if not isinstance(factors, list):
        raise unusable(key, factors, "it must be a list")
    return tuple(positive(key, real(key, factor)) for factor in factors)


def _attention_factor(params: Mapping[str, Any], kind: RopeType, factor: float, original: int) -> float | None:
    if kind not in (RopeType.YARN, RopeType.LONGROPE):
        return None
    if params.get("attention_factor") is not None:
        return rope_number(params, "attention_factor", 1.0)
    if kind == RopeType.LONGROPE:
        return longrope_attention_factor(factor, original)
    mscale, all_dim = (rope_number(params, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale and all_dim and factor > 1:
        return float((0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0))
    return None


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return LongRoPE's factor of cosines and sines (Ding et al., 2024) for a context ``factor`` times as long.

    ``original``: the context of the training, in tokens.
    """
    if factor <= 1.0:
        return 1.0
    if original == 1:
        raise UnsupportedModel("original_max_position_embeddings 1 is not supported with longrope")
    return math.sqrt(1.0 + math.log(factor) / math.log(original))
