"""Chooses the weight source, loads, and identifies what was loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from ...model_files.config import ModelConfig
from ...model_files.model_path import ModelSource
from .base import WeightSource, load_weights
from .dummy_weights import DummyWeights

SAMPLES = 64


def load_model_weights(
    weights: dict[str, Tensor],
    source: ModelSource,
    config: ModelConfig,
    load_format: Literal["auto", "dummy"],
    seed: int,
) -> None:
    """Fill ``weights`` (name → view) from ``source``, or at random; raises ``InvalidWeights``, ``UnsupportedModel``."""
    with torch.inference_mode():
        load_weights(weights, _open_source(weights, source, config, load_format, seed))


def _open_source(
    weights: dict[str, Tensor], source: ModelSource, config: ModelConfig, load_format: str, seed: int
) -> WeightSource:
    if load_format == "dummy":
        return DummyWeights({name: view.shape for name, view in weights.items()}, seed)
    if source.kind == "gguf":
        from .gguf_weights import GGUFWeights

        return GGUFWeights(source.path, config)
    from .safetensors_weights import SafetensorsWeights

    return SafetensorsWeights(source.path)


def fingerprint(config: ModelConfig, weights: dict[str, Tensor], quantization: str = "none") -> str:
    """16 hex digits that two instances share if they serve the same weights in the same type, rounded alike.

    Hashes the config and ``SAMPLES`` values spread over each tensor: enough to tell checkpoints apart, in milliseconds.
    """
    digest = xxhash.xxh3_64(msgspec.json.encode(asdict(config)))
    if quantization != "none":
        digest.update(quantization.encode())
    for name in sorted(weights):
        view = weights[name]
        rows = _spread(view.shape[0])
        sample = view[rows] if view.dim() == 1 else view[rows, _spread(view.shape[1])]
        digest.update(f"{name}{list(view.shape)}{view.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return str(digest.hexdigest())


def _spread(size: int) -> Tensor:
    """``SAMPLES`` indices over ``size``; hashed by a prime step, so that rows and columns don't move in lockstep."""
    return torch.from_numpy(np.arange(SAMPLES, dtype=np.int64) * 7919 % size)
