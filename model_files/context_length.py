"""How long a sequence is served, and what of a model follows from that alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from .errors import UnsupportedModel
from .spec import LayerSpec, MLASpec, ModelSpec, RopeSpec


class Described(Protocol):
    """Any description of a model."""

    @property
    def context_length(self) -> int:
        """The longest sequence, in tokens."""


def choose_context_length(model: Described, wanted: int | None) -> int:
    """Return the context length to serve, in tokens: ``wanted``, or the model's own limit if that is None.

    Raises ``UnsupportedModel`` if ``wanted`` is above the model's limit, or not above 0.
    """
    if wanted is None:
        return model.context_length
    if not 0 < wanted <= model.context_length:
        raise UnsupportedModel(
            f"--context-length {wanted} is not within the model's own limit, {model.context_length} tokens"
        )
    return wanted


def with_context(spec: ModelSpec, length: int) -> ModelSpec:
    """Return ``spec`` with a context of ``length`` tokens, and with longrope's factors chosen for it.

    The long factors are chosen if ``length`` exceeds the model's original context.
    Instances that hand over to each other must choose the same factors, or their fingerprints differ.
    Their lengths themselves may differ.
    """
    ropes = tuple(_with_factors(rope, length) for rope in spec.ropes)
    return replace(spec, ropes=ropes, context_length=length)


def without_idle_windows(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` without the windows of layers that are at least as long as its context.

    They never hide a token, and more engines can compute a model without windows.
    """
    return replace(spec, layers=tuple(_without_window(layer, spec.context_length) for layer in spec.layers))


def _with_factors(rope: RopeSpec, length: int) -> RopeSpec:
    if not rope.long_factors:
        return rope
    factors = rope.long_factors if length > rope.original_context else rope.freq_factors
    return replace(rope, freq_factors=factors, long_factors=())


def _without_window(layer: LayerSpec, length: int) -> LayerSpec:
    attention = layer.attention
    if isinstance(attention, MLASpec) or attention.window is None or attention.window < length:
        return layer
    return replace(layer, attention=replace(attention, window=None))
