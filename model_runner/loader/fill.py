"""Chooses the weight source, and fills a model from it. Imports no torch, except for random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ...model_files.errors import naming
from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..torch_import import note_torch
from .arrays import float_type
from .base import Target, WeightPlace, WeightSource, load_weights
from .dequantise import Dequantise
from .host_model import weight_shapes


class Origin(NamedTuple):
    """Where a model's weights come from."""

    source: ModelSource
    spec: ModelSpec
    """Description of the whole model."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Whether they are in files, or random."""
    seed: int = 0
    """Seed of random weights."""
    shard: Shard | None = None
    """Part of the model to load; None: all of it."""
    dequantise: Dequantise | None = None
    """Dequantises rows of a GGUF file to the types of their places. None: gguf does it, to float32."""

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole model's weights by name."""
        return weight_shapes(self.spec)


def fill_places(
    places: Mapping[str, WeightPlace],
    shapes: Mapping[str, tuple[int, ...]],
    origin: Origin,
    left_out: frozenset[str] = frozenset(),
) -> dict[str, bytes]:
    """Fill ``places`` (by name) from ``origin``, except for those ``left_out``.

    ``shapes``: those of the whole weights. Returns values of each tensor for ``fingerprint``. Raises ``InvalidWeights``
    or ``UnsupportedModel``.
    """
    shard = origin.shard
    targets = {
        name: Target(place, shapes[name], None if shard is None else shard.slice_of(name))
        for name, place in places.items()
        if name not in left_out
    }
    with naming(origin.source.path):
        return load_weights(targets, _open_source(targets, origin, left_out))


def _open_source(targets: Mapping[str, Target], origin: Origin, left_out: frozenset[str]) -> WeightSource:
    if origin.load_format == "dummy":
        note_torch("random weights")
        from .dummy_weights import DummyWeights

        return DummyWeights({name: target.shape for name, target in targets.items()}, origin.seed)
    if origin.source.kind == "gguf":
        from .gguf_weights import GGUFWeights

        if origin.dequantise is None:
            return GGUFWeights(origin.source.path, origin.spec, left_out)
        types = {name: float_type(target.place.dtype) for name, target in targets.items()}
        return GGUFWeights(origin.source.path, origin.spec, left_out, types, origin.dequantise)
    from .safetensors_weights import SafetensorsWeights

    return SafetensorsWeights(origin.source.path, origin.spec, left_out)
