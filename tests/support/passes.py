"""Passes of an engine on the host, and what they leave in its pools, in tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.engines.base import Engine
from pdserve.model_runner.kv.block_pool import BlockPool
from pdserve.model_runner.kv.pool import KVPool


def forward(engine: Engine, batch: ForwardBatch) -> Tensor:
    """Compute the logits of ``batch.logit_indices``, [L, V] float32."""
    return torch.from_numpy(engine.host_logits(batch.on_host()))


def pool_bytes(pool: BlockPool | KVPool) -> Tensor:
    """Return the bytes of a pool on the host, [P, L, bytes of a layer] uint8, where they lie."""
    if isinstance(pool, BlockPool):
        return torch.from_numpy(pool.data)
    return pool.data.view(torch.uint8).view(*pool.data.shape[:2], -1)
