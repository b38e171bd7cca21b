"""What ``--quantization`` means for the CPU kernels, and where quantised weights come from. Imports no torch."""

from __future__ import annotations

from ...model_files.errors import UnsupportedModel
from ...model_files.model_path import ModelSource
from ...model_files.packed_names import packing_of
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..options import WorkerOptions
from .gguf_blocks import GGUFBlocks
from .quantization import AsBlocks, QuantizedActivations
from .quantized_blocks import BlockSource, RoundedBlocks

NOT_PACKED = "the model's files have no weights in FP8, AWQ, GPTQ or INT4"


def choose_blocks(options: WorkerOptions, source: ModelSource) -> AsBlocks:
    """Return the quantisation that ``--quantization`` means for this model on the CPU kernels.

    Raises ``UnsupportedModel`` if it asks for weights that stay packed as in the files, which the kernels don't know.
    """
    asked = options.quantization
    if asked == "packed" or asked == "w8a8":
        is_packed = source.kind == "hf" and packing_of(source.path) is not None
        reason = "packed weights need --attention-backend torch, triton or flashinfer" if is_packed else NOT_PACKED
        raise UnsupportedModel(f"--quantization {asked}: {reason}")
    if asked != "auto":
        return asked
    return "none" if source.kind != "gguf" or options.dtype != "auto" or options.load_format == "dummy" else "gguf"


def open_blocks(
    quantization: AsBlocks,
    source: ModelSource,
    spec: ModelSpec,
    dtype: str,
    shard: Shard | None = None,
    activations: QuantizedActivations = "int16",
) -> BlockSource | None:
    """Return the source of weights that are quantised as ``choose_blocks`` says; None for "none".

    Raises ``UnsupportedModel`` if ``source`` is no GGUF file but its blocks are asked for. ``dtype``: name of the type
    of dense weights. ``shard``: this rank's part, or None. ``activations``: the type that activations are rounded to.
    """
    if quantization == "none":
        return None
    blocks = _open(quantization, source, spec, dtype, shard)
    blocks.activations = activations
    return blocks


def _open(quantization: AsBlocks, source: ModelSource, spec: ModelSpec, dtype: str, shard: Shard | None) -> BlockSource:
    if quantization == "int8":
        return RoundedBlocks(8)
    if quantization == "int4":
        return RoundedBlocks(4)
    if source.kind != "gguf":
        raise UnsupportedModel("--quantization gguf serves the blocks of a .gguf file; use int8 or int4 for this model")
    blocks = GGUFBlocks(source.path, spec, shard)
    blocks.log_summary(dtype)
    return blocks
