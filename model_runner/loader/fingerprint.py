"""Identifies what was loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import msgspec
import xxhash

from ...model_files.spec import ModelSpec
from .quantized_blocks import BlockSource


def fingerprint(
    spec: ModelSpec, samples: Mapping[str, bytes], quantization: str = "none", blocks: BlockSource | None = None
) -> str:
    """Return 16 hex digits that tell apart instances with different KV.

    Instances share them if they serve the same weights in the same type and round weights and activations alike.
    ``samples``: those of the tensors (see ``load_weights``), except for the ones that ``blocks`` identifies.

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
