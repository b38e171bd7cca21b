"""What ``--quantization`` comes to, and where a checkpoint's packed weights are computed with as they are."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from ...model_files.errors import UnsupportedModel
from ...model_files.model_path import ModelSource
from ...model_files.packed_names import packing_of
from ...model_files.packing import PackingKind
from ...model_files.sharding import Shard
from ...model_files.spec import ModelSpec
from ..device.triton_support import triton_refusal
from ..models.decoder import Decoder
from ..options import WorkerOptions
from .open_blocks import NOT_PACKED, choose_blocks
from .packed_layers import PackedLayers
from .packed_sources import CheckpointMatrices, DummyMatrices, PackedSource
from .quantization import Quantization

log = logging.getLogger(__name__)

AsPacked = Literal["packed", "w8a8"]
MULTIPLIES_FP8 = (8, 9)
"""Compute capability from which on a GPU does."""


def choose_quantization(
    options: WorkerOptions, source: ModelSource, device: torch.device, dtype: torch.dtype, *, is_alone: bool
) -> Quantization:
    """Return the quantisation that ``--quantization`` means for this model and device, on the torch engine.

    ``dtype``: type of the model. ``is_alone``: whether there is one rank. Raises ``UnsupportedModel``.
    """
    as_packed = choose_packed(options.quantization, source, device, is_alone=is_alone)
    if as_packed is not None:
        return as_packed
    chosen = choose_blocks(options, source)
    if chosen == "none":
        return "none"
    if options.quantization != "auto":
        raise UnsupportedModel(f"--quantization {chosen} needs the CPU kernels, which can't be used here")
    # Other instances may have kernels: the fingerprint keeps them from handing over to this one.
    log.warning("the GGUF's own blocks need the CPU kernels; it is served dequantised, in %s", dtype)
    return "none"


def choose_packed(asked: str, source: ModelSource, device: torch.device, *, is_alone: bool) -> AsPacked | None:
    """Return how the files' packed weights are multiplied without dequantising; None if that is not to be done.

    "packed": activations stay as they are. "w8a8": they are rounded to FP8. ``asked``: value of ``--quantization``.
    Values other than these two and "auto" give None. The other arguments are those of ``choose_quantization``. Raises
    ``UnsupportedModel`` if what was asked is impossible.
    """
    if asked not in ("auto", "packed", "w8a8"):
        return None
    packing = packing_of(source.path) if source.kind == "hf" else None
    if asked == "auto" and (packing is None or device.type != "cuda"):
        return None
    reason = triton_refusal(device)
    if packing is None:
        reason = NOT_PACKED
    elif asked == "w8a8" and not is_alone:
        reason = "a rank of --tp-size knows a part of a token's activations, and would round it by itself; take packed"
    elif asked == "w8a8" and packing.kind is not PackingKind.FP8:
        reason = f"the model's weights are in {packing.kind}, not in FP8"
    elif asked == "w8a8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < MULTIPLIES_FP8:
        reason = "this GPU does not multiply FP8, as those of compute capability 8.9 on do; take packed"
    if reason is None:
        return "w8a8" if asked == "w8a8" else "packed"
    if asked != "auto":
        raise UnsupportedModel(f"--quantization {asked}: {reason}")
    log.warning("the weights can't stay packed: %s", reason)
    return None


def open_packed(
    quantization: AsPacked,
    model: Decoder,
    source: ModelSource,
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int | None,
    shard: Shard | None,
) -> PackedLayers:
    """Choose the linear layers of ``model`` that keep packed weights, before it has memory for them; load nothing yet.

    ``model``: the part ``shard`` of the whole model ``spec``. ``seed``: seed of random weights, or None for the files'
    weights. Raises ``InvalidWeights`` if the files can't be read.
    """
    # Imported here: it imports Triton.
    from ..ops.packed.product import packed_product

    packing = packing_of(source.path)
    assert packing is not None
    layers = model.linears()
    matrices: PackedSource
    if seed is None:
        matrices = CheckpointMatrices(source.path, spec, packing)
    else:
        whole = Decoder(spec, dtype, torch.device("meta")).weights()
        names = [name for names in layers for name in names]
        matrices = DummyMatrices({name: whole[name].shape for name in names}, packing, seed)
    device = model.embed_tokens.device
    return PackedLayers(layers, matrices, dtype, device, packed_product, shard, eight=quantization == "w8a8")
