"""A loaded model: description, KV pools and engine, ready to run passes."""

from __future__ import annotations

from dataclasses import dataclass

from ...model_files.model_impl import ModelImpl
from ...model_files.spec import ModelSpec
from ..device.base import Device
from ..grammar.matchers import MakesMatchers
from ..kv.pools import Pools
from ..loader.quantization import Quantization, QuantizedActivations
from .base import Engine


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One model on one device.

    A tensor-parallel rank has its own part of the weights. Description, layout of the pools and ``fingerprint`` are
    those of the whole model.
    """

    implementation: ModelImpl
    spec: ModelSpec | None
    """Description; None if transformers' own class computes."""
    context_length: int
    """Tokens of the longest sequence."""
    vocab_size: int
    device: Device
    dtype: str
    """Name of the type of weights and activations."""
    quantization: Quantization
    """What ``--quantization auto`` came to."""
    quantized_activations: QuantizedActivations | None
    """Type that activations are rounded to; None: they stay as they are."""
    fingerprint: str
    weight_bytes: int
    """Bytes of the weights in memory."""
    step_bytes: int
    """Bytes of an accelerator that steps take beside weights and pools; 0: not measured."""
    pools: Pools
    engine: Engine
    matchers: MakesMatchers
    """Makes matchers of output against grammars."""
    load_seconds: dict[str, float]
    """Seconds of each part of loading."""
