"""Kinds of layers, which share a plan: kernels that plan ahead bake a layer's window, cap and scale into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...model_files.spec import AttentionSpec, MLASpec


class LayerKind(NamedTuple):
    """What layers have in common that are planned together. ``group``: number of their page group.

    ``window``: tokens that one sees, its own included; None: all. ``latent``: (kv_lora_rank, qk_rope_head_dim), or
    None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    latent: tuple[int, int] | None
    group: int


def layer_kinds(
    attentions: Sequence[AttentionSpec | MLASpec], groups: Mapping[int, int]
) -> tuple[list[LayerKind], list[int]]:
    """Return the distinct kinds of layers, and for each layer the index of its kind in that list.

    Layers of a kind attend alike and share a plan. Kinds are in the order of their first layers. ``groups``: index of
    each layer's page group.
    """
    kinds: dict[LayerKind, int] = {}
    of_layer = []
    for layer, spec in enumerate(attentions):
        latent = (spec.kv_lora_rank, spec.qk_rope_head_dim) if isinstance(spec, MLASpec) else None
        window = None if isinstance(spec, MLASpec) else spec.window
        softcap = None if isinstance(spec, MLASpec) else spec.softcap
        sizes = (spec.heads, spec.kv_heads, spec.head_dim)
        kind = LayerKind(*sizes, spec.scale, window, softcap, latent, groups[layer])
        of_layer.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), of_layer
