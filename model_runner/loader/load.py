"""Loads weights into torch's tensors, and identifies those of transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from .fill import Origin, fill_places
from .packed_layers import PackedLayers
from .tensor_samples import sample_tensor
from .tensors import TensorPlace


def load_model_weights(
    weights: Mapping[str, Tensor],
    source: ModelSource,
    spec: ModelSpec,
    load_format: Literal["auto", "dummy"],
    seed: int,
    shard: Shard | None = None,
    packed: PackedLayers | None = None,
) -> dict[str, bytes]:
    """Fill ``weights`` (name → view) from ``source``, or with random numbers if ``load_format`` is "dummy".

    ``packed``: these layers are filled too, in place of their views. ``shard``: the part of the model ``spec`` that
    ``weights`` are; None: all. Returns values of each tensor for ``fingerprint``. Raises ``InvalidWeights`` or
    ``UnsupportedModel``.
    """
    origin = Origin(source, spec, load_format, seed, shard)
    shapes = {name: tuple(view.shape) for name, view in weights.items()} if shard is None else origin.whole_shapes()
    left_out: frozenset[str] = frozenset() if packed is None else packed.left_out
    with torch.inference_mode():
        places = {name: TensorPlace(view) for name, view in weights.items()}
        samples = fill_places(places, shapes, origin, left_out)
    if packed is not None:
        samples |= packed.fill(shapes)
        packed.log_summary()
    return samples


def foreign_fingerprint(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a model that transformers' own class runs, from its config and all its tensors.

    The engine doesn't know whether its KV is that of a native model, so the two never share a fingerprint.
    """
    digest = xxhash.xxh3_64(b"transformers" + json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        digest.update(sample_tensor(name, weights[name], weights[name].dtype))
    return str(digest.hexdigest())
