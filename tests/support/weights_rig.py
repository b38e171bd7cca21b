"""A folder of packed weights, a tiny model, and a builder that counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.weights_cache.cache import CachedWeights
from pdserve.model_runner.weights_cache.local_builder import LocalBuilder
from pdserve.model_runner.weights_cache.request import PackOrder, PackRequest
from pdserve.server.options import ServerOptions

from .machine import limit
from .passes import forward
from .tiny_model import CONFIG

VOCAB = 97
TOKENS = [(7 * i) % VOCAB for i in range(40)]


class Builds:
    """Packs models here, and counts them."""

    def __init__(self) -> None:
        self.requests: list[PackRequest] = []
        self.before: Callable[[int], None] = lambda fd: None

    def build(self, request: PackRequest, fd: int) -> None:
        self.requests.append(request)
        self.before(fd)
        LocalBuilder().build(request, fd)


class Rig:
    """A folder of packed weights and a model."""

    def __init__(self, tmp_path: Path) -> None:
        self.model = tmp_path / "model"
        self.model.mkdir()
        self.config(vocab_size=VOCAB)
        self.folder = tmp_path / "weights"
        self.builds = Builds()
        self.source = CachedWeights(self.folder, self.builds, limit(20))

    def config(self, **changes: Any) -> None:
        config = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | changes
        (self.model / "config.json").write_text(json.dumps(config))

    def options(self, **options: Any) -> ServerOptions:
        defaults = {"load_format": "dummy", "dtype": "float32", "max_total_tokens": 512, "device": "cpu"}
        return ServerOptions(model_path=str(self.model), **(defaults | options))

    def load(self, **options: Any) -> LoadedModel:
        return load_model(self.options(**options), weights_source=self.source)

    def logits(self, **options: Any) -> torch.Tensor:
        return logits_of(self.load(**options))

    def expected(self, **options: Any) -> torch.Tensor:
        """Compute logits of a model that is packed for this process alone."""
        return logits_of(load_model(self.options(**options)))

    def request(self, **options: Any) -> PackRequest:
        asked = self.options(**options)
        order = PackOrder(dataclasses.asdict(asked), "float32", "float32", None, 0, 1, 1, 0, 0)
        return order.read()

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []

    @property
    def file(self) -> Path:
        (only,) = self.files
        assert only.suffix == ".weights"
        return only


def logits_of(model: LoadedModel) -> torch.Tensor:
    table = torch.arange(512, dtype=torch.int32)[None]
    count = len(TOKENS)
    batch = ForwardBatch(
        input_ids=torch.tensor(TOKENS),
        positions=torch.arange(count),
        out_cache_loc=table[0, 16 : 16 + count].long(),
        rows=torch.tensor([0]),
        starts=[0],
        q_lens=[count],
        req_to_token=table[:, 16:].contiguous(),
        logit_indices=torch.arange(count),
    )
    return forward(model.engine, batch)
