"""Rows of a model that tensor-parallel ranks compute together: threads of this process, each with an engine of its own.

Who measures calls ``ranked_rows`` and knows nothing of how ranks are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pdserve.model_files.context_length import with_context, without_idle_windows
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sharding import Shard, shard
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.tensor_names import EMBEDDING, HEAD
from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.kernels.cpu_engine import CpuEngine
from pdserve.model_runner.kernels.lowering import refusal
from pdserve.model_runner.kernels.native_engine import NativeEngine, Ranks
from pdserve.model_runner.kernels.ranks import NativeRanks
from pdserve.model_runner.kernels.rope_tables import RopeTables
from pdserve.model_runner.kernels.team import Team
from pdserve.model_runner.kv_pool import MHATokenToKVPool, make_layout
from pdserve.model_runner.layers.rotary import RotaryEmbedding
from pdserve.model_runner.loader.load import load_model_weights
from pdserve.model_runner.models.decoder import Decoder

from .model_harness import CONTEXT, PAGE, PAGES, Rows

DTYPE, CPU = torch.float32, torch.device("cpu")


def ranked_rows(folder: Path, size: int) -> Rows:
    """Rows of the model in ``folder`` in float32 on ``size`` ranks; ``UnsupportedModel`` where it can't be divided."""
    source = ModelSource("hf", folder)
    described = read_spec(source)
    spec = without_idle_windows(with_context(described, described.context_length))
    shards = [shard(spec, rank, size) for rank in range(size)]
    reason = refusal(shards[0].spec, DTYPE, DTYPE)
    if reason is not None:
        raise UnsupportedModel(f"the CPU kernels: {reason}")
    weights = Decoder(spec, DTYPE, CPU).weights()
    load_model_weights(weights, source, spec, "auto", 0)
    pool = MHATokenToKVPool(make_layout(spec, PAGE, DTYPE, "blocks"), PAGES + 1, CPU)
    groups = _groups(size, spec.hidden_size, spec.vocab_size)
    engines = [
        _RankEngine(_part(weights, own), pool, Ranks(own, group)) for own, group in zip(shards, groups, strict=True)
    ]

    threads = ThreadPoolExecutor(size)

    def compute(batch: ForwardBatch) -> Tensor:
        first, *others = threads.map(lambda engine: engine.forward(batch), engines)
        assert all(torch.equal(first, other) for other in others)
        return first

    return Rows(compute)


class _RankEngine(CpuEngine):
    """The engine of one rank, of ``model``, which has this rank's part of every weight."""

    def __init__(self, model: Decoder, pool: MHATokenToKVPool, ranks: Ranks) -> None:
        spec = model.spec
        ropes = [RotaryEmbedding(rope, spec.head_dim, dtype=DTYPE, device=CPU) for rope in spec.ropes]
        NativeEngine.__init__(self, spec, DTYPE, RopeTables(ropes, spec.head_dim), pool, Team(1), ranks)
        self._blocks = None
        self.weight_bytes = 0
        self._pack(model)


def _groups(size: int, hidden: int, vocab: int) -> list[NativeRanks]:
    first = NativeRanks(0, size, CONTEXT, hidden, vocab)
    groups = [first, *(NativeRanks(r, size, CONTEXT, hidden, vocab, os.dup(first.fd)) for r in range(1, size))]
    for group in groups:
        # All have mapped what it names.
        os.close(group.fd)
    return groups


def _part(weights: Mapping[str, Tensor], own: Shard) -> Decoder:
    """The model of one rank, filled from the whole one's ``weights``."""
    model = Decoder(own.spec, DTYPE, CPU)
    for name, view in model.weights().items():
        part = own.slice_of(name)
        if name == HEAD:
            continue
        if part is None:
            view.copy_(weights[name])
        elif part.size:
            view.copy_(weights[name].narrow(part.axis, part.begin, part.size))
        else:
            view.zero_()
    model.lm_head = weights.get(HEAD, weights[EMBEDDING])[own.vocab.begin : own.vocab.end]
    return model
