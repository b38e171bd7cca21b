"""Chooses where quantised weights come from."""

from __future__ import annotations

from typing import Literal

import torch

from ...model_files.errors import UnsupportedModel
from ...model_files.model_path import ModelSource
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from .gguf_blocks import GGUFBlocks
from .quantization import QuantizedActivations
from .quantized_blocks import BlockSource, RoundedBlocks


def open_blocks(
    quantization: Literal["gguf", "int8", "int4"],
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    shard: Shard | None = None,
    activations: QuantizedActivations = "int16",
) -> BlockSource:
    """Return the source of quantised weights that ``--quantization`` chooses for ``source``.

    Raises ``UnsupportedModel`` if that is no GGUF file but its blocks are asked for. ``dtype``: type of dense weights.
    ``shard``: this rank's part, or None. ``activations``: the type that activations are rounded to.
    """
    blocks = _open(quantization, source, spec, dtype, shard)
    blocks.activations = activations
    return blocks


def _open(
    quantization: Literal["gguf", "int8", "int4"],
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    shard: Shard | None,
) -> BlockSource:
    if quantization == "int8":
        return RoundedBlocks(8)
    if quantization == "int4":
        return RoundedBlocks(4)
    if source.kind != "gguf":
        raise UnsupportedModel("--quantization gguf serves the blocks of a .gguf file; use int8 or int4 for this model")
    blocks = GGUFBlocks(source.path, spec, shard)
    blocks.log_summary(dtype)
    return blocks
