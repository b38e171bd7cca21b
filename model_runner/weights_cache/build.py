"""Loads a model and packs it for the CPU kernels into an open file. Imports no torch."""

from __future__ import annotations

from ..cpu_engine.conversion import NativeConversion
from ..cpu_engine.library import ActivationDType
from ..cpu_engine.packed_model import PackedModelWriter
from ..cpu_engine.team import Team
from ..cpu_engine.weight_memory import check_room
from ..cpu_engine.weight_packer import WeightPacker
from ..loader.host_weights import HostLoader
from .model_packer import ModelPacker
from .request import PackRequest


def build(request: PackRequest, key: str, fd: int, threads: int) -> None:
    """Load the model, pack it for the CPU kernels, and write it to the empty file ``fd``.

    ``key`` identifies the packed weights in the file. Raises ``ModelError``, ``BuildError`` or ``OSError``.
    """
    options, part, team = request.options, request.shard, Team(threads)
    described = (options, request.source, request.spec, request.identity, request.dtype, part)
    weights = HostLoader(*described, NativeConversion(team)).load()
    check_room(fd, weights.nbytes)
    writer = PackedModelWriter(fd)
    vocab = None if part is None else part.vocab
    activations = ActivationDType[(weights.activations or "int16").upper()]
    packer = WeightPacker(request.own_spec, request.dtype, request.kv_dtype, team, vocab, activations)
    writer.finish(ModelPacker(weights, packer, writer).pack(key, request.path, request.positions))
