"""Chooses the weight source, loads, and identifies what was loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import msgspec
import torch
import xxhash
from torch import Tensor

from ...model_files.errors import naming
from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..models.decoder import Decoder
from .base import Target, WeightSource, load_weights
from .dummy_weights import DummyWeights
from .packed_layers import PackedLayers
from .quantized_blocks import BlockSource
from .samples import sample


def load_model_weights(
    weights: Mapping[str, Tensor],
    source: ModelSource,
    spec: ModelSpec,
    load_format: Literal["auto", "dummy"],
    seed: int,
    blocks: BlockSource | None = None,
    shard: Shard | None = None,
    packed: PackedLayers | None = None,
) -> dict[str, bytes]:
    """Fill ``weights`` (name → view) from ``source``, or with random numbers if ``load_format`` is "dummy".

    ``blocks``: weights that it serves quantised are checked for their shapes, and their views are not written, so that
    they take no memory. ``packed``: these layers are filled too, in place of their views. ``shard``: the part of the
    model ``spec`` that ``weights`` are; None: all. Returns values of each tensor for ``fingerprint``. Raises
    ``InvalidWeights`` or ``UnsupportedModel``.
    """
    shapes = {name: view.shape for name, view in _whole(weights, spec, shard).items()}
    left_out: frozenset[str] = frozenset()
    if blocks is not None:
        blocks.check(shapes)
        left_out = blocks.left_out
    elif packed is not None:
        left_out = packed.left_out
    targets = {
        name: Target(view, shapes[name], None if shard is None else shard.slice_of(name))
        for name, view in weights.items()
        if name not in left_out
    }
    with torch.inference_mode(), naming(source.path):
        samples = load_weights(targets, _open_source(targets, source, spec, load_format, seed, left_out))
    if packed is not None:
        samples |= packed.fill(shapes)
        packed.log_summary()
    return samples


def _whole(weights: Mapping[str, Tensor], spec: ModelSpec, shard: Shard | None) -> Mapping[str, Tensor]:
    """Return the tensors of the whole model by name, for their shapes; with ranks they have no values."""
    return weights if shard is None else Decoder(spec, torch.float32, torch.device("meta")).weights()


def _open_source(
    targets: Mapping[str, Target],
    source: ModelSource,
    spec: ModelSpec,
    load_format: str,
    seed: int,
    left_out: frozenset[str],
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights({name: target.shape for name, target in targets.items()}, seed)
    if source.kind == "gguf":
        from .gguf_weights import GGUFWeights

        return GGUFWeights(source.path, spec, left_out)
    from .safetensors_weights import SafetensorsWeights

    return SafetensorsWeights(source.path, spec, left_out)


def fingerprint(
    spec: ModelSpec, samples: Mapping[str, bytes], quantization: str = "none", blocks: BlockSource | None = None
) -> str:
    """Return 16 hex digits that tell apart instances with different KV.

    Instances share them if they serve the same weights in the same type and round weights and activations alike.
    ``samples``: those of the tensors (see ``load_model_weights``), except for the ones that ``blocks`` identifies.

    Hashes the model, ``SAMPLES`` values spread over each tensor and some of each token's embedding. That is enough to
    tell checkpoints apart and takes a tenth of a second at most.

    The context length does not count, but what follows from it does (longrope's factors). Neither the names of tensors
    in the files nor the number of ranks count. Nor does it count whether weights stay packed, if they are multiplied as
    if they were dequantised (``packed_layers.py``): such instances hand over to each other.
    """
    digest = xxhash.xxh3_64(msgspec.json.encode(asdict(replace(spec, context_length=0, tensors={}))))
    if quantization != "none":
        digest.update(quantization.encode())
    if blocks is not None:
        digest.update(blocks.activations.encode())
    as_blocks = frozenset[str]() if blocks is None else blocks.identifying
    for name in sorted(samples.keys() | as_blocks):
        if blocks is not None and name in as_blocks:
            digest.update(name.encode())
            blocks.sample(name, digest)
        else:
            digest.update(samples[name])
    return str(digest.hexdigest())


def foreign_fingerprint(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a model that transformers' own class runs, from its config and all its tensors.

    The engine doesn't know whether its KV is that of a native model, so the two never share a fingerprint.
    """
    digest = xxhash.xxh3_64(b"transformers" + json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        digest.update(sample(name, weights[name], weights[name].dtype))
    return str(digest.hexdigest())
