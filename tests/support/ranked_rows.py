"""Rows of a model that tensor-parallel ranks compute together, as threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.server.options import ServerOptions

from .model_harness import PAGE, PAGES, Rows
from .passes import forward
from .rank_threads import make_ranks


def ranked_rows(folder: Path, size: int, backend: str) -> Rows:
    """Make rows of the model in ``folder`` in float32 on ``size`` ranks. Raises ``UnsupportedModel``."""
    options = ServerOptions(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        page_size=PAGE,
        max_total_tokens=PAGES * PAGE,
        attention_backend="cpu" if backend == "cpu" else "torch",
    )
    runners = make_ranks(size, options)
    threads = ThreadPoolExecutor(size)

    def compute(batch: ForwardBatch) -> Tensor:
        first, *others = threads.map(lambda runner: forward(runner.engine, batch), runners)
        assert all(torch.equal(first, other) for other in others)
        return first

    return Rows(compute)
