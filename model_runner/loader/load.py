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

from ...model_files.model_path import ModelSource
from ...model_files.spec import ModelSpec
from .base import WeightSource, load_weights
from .dummy_weights import DummyWeights
from .quantized_blocks import BlockSource
from .samples import spread


def load_model_weights(
    weights: dict[str, Tensor],
    source: ModelSource,
    spec: ModelSpec,
    load_format: Literal["auto", "dummy"],
    seed: int,
    blocks: BlockSource | None = None,
) -> None:
    """Fill ``weights`` (name → view) from ``source``, or at random; raises ``InvalidWeights``, ``UnsupportedModel``.

    What ``blocks`` has in the place of floats is checked and left as it is: memory that was never written takes none.
    """
    left_out: frozenset[str] = frozenset()
    if blocks is not None:
        blocks.check({name: view.shape for name, view in weights.items()})
        left_out = blocks.left_out
    wanted = {name: view for name, view in weights.items() if name not in left_out}
    with torch.inference_mode():
        load_weights(wanted, _open_source(wanted, source, spec, load_format, seed, left_out))


def _open_source(
    weights: dict[str, Tensor],
    source: ModelSource,
    spec: ModelSpec,
    load_format: str,
    seed: int,
    left_out: frozenset[str],
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights({name: view.shape for name, view in weights.items()}, seed)
    if source.kind == "gguf":
        from .gguf_weights import GGUFWeights

        return GGUFWeights(source.path, spec, left_out)
    from .safetensors_weights import SafetensorsWeights

    return SafetensorsWeights(source.path, spec)


def fingerprint(
    spec: ModelSpec, weights: dict[str, Tensor], quantization: str = "none", blocks: BlockSource | None = None
) -> str:
    """16 hex digits that two instances share if they serve the same weights in the same type, rounded alike.

    ``weights`` that ``blocks`` has in the place of floats count as those blocks.

    Hashes the model and ``SAMPLES`` values spread over each tensor: enough to tell checkpoints apart, in milliseconds.
    How long a sequence is served does not count, but what follows from it does (longrope's factors), and neither do the
    names of the tensors in the files.
    """
    digest = xxhash.xxh3_64(msgspec.json.encode(asdict(replace(spec, context_length=0, tensors={}))))
    if quantization != "none":
        digest.update(quantization.encode())
    for name in sorted(weights):
        if blocks is not None and name in blocks.left_out:
            digest.update(name.encode())
            blocks.sample(name, digest)
        else:
            _sample(name, weights[name], digest)
    return str(digest.hexdigest())


def foreign_fingerprint(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """``fingerprint`` of a model by transformers' own class: of its config there and all its tensors.

    Its keys may be those of a native model's, but nothing here knows that they are.
    """
    digest = xxhash.xxh3_64(b"transformers" + json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        _sample(name, weights[name], digest)
    return str(digest.hexdigest())


def _sample(name: str, tensor: Tensor, digest: xxhash.xxh3_64) -> None:
    digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
    if tensor.numel() == 0:
        return
    view = tensor.reshape(-1) if tensor.dim() < 2 else tensor.flatten(0, -2)
    rows = spread(view.shape[0])
    sample = view[rows] if view.dim() == 1 else view[rows, spread(view.shape[1])]
    digest.update(sample.contiguous().view(torch.uint8).cpu().numpy().tobytes())
