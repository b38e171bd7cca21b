"""Loads a model with torch and packs it for the CPU kernels into an open file."""

from __future__ import annotations

import torch

from ..cpu_engine.library import ActivationDType
from ..cpu_engine.packed_model import PackedModelWriter
from ..cpu_engine.team import Team
from ..cpu_engine.weight_memory import check_room
from ..cpu_engine.weight_packer import WeightPacker
from ..loader.weight_loader import WeightLoader
from .model_packer import ModelPacker
from .request import PackRequest


def build(request: PackRequest, key: str, fd: int, threads: int) -> None:
    """Load the model with torch, pack it for the CPU kernels, and write it to the empty file ``fd``.

    ``key`` identifies the packed weights in the file. Raises ``ModelError``, ``BuildError`` or ``OSError``.
    """
    options, part = request.options, request.shard
    dtype: torch.dtype = getattr(torch, request.dtype)
    loader = WeightLoader(
        options, request.source, request.spec, request.identity, dtype, torch.device("cpu"), part, is_native=True
    )
    weights = loader.load()
    check_room(fd, weights.nbytes)
    writer = PackedModelWriter(fd)
    vocab = None if part is None else part.vocab
    activations = ActivationDType[(weights.activations or "int16").upper()]
    packer = WeightPacker(request.own_spec, request.dtype, request.kv_dtype, Team(threads), vocab, activations)
    with torch.inference_mode():
        contents = ModelPacker(weights, packer, writer).pack(key, request.path, request.positions)
    writer.finish(contents)
