"""Triton's attention over a pool in which whatever no row may read is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdserve.model_runner.attention.base import AttentionLimits
from pdserve.model_runner.attention.triton import paged_decode, paged_prefill, store_kv
from pdserve.model_runner.attention.triton.backend import TritonAttention
from pdserve.model_runner.attention.triton.tiles import DecodeTiles, PrefillTiles
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.kv.pool import KVPool

from .attention_reference import HEADS
from .triton_device import DEVICE

WINDOWS = (1, 5, 20, 37)
SMALL = DecodeTiles(16, 16, 4, 3, 32, 2), PrefillTiles(64, 16, 4, 3)
"""Tiles with which short rows have several blocks and several splits."""
KERNELS = (
    (store_kv, "store_kv_rows"),
    (paged_decode, "paged_decode_split"),
    (paged_decode, "paged_decode_reduce"),
    (paged_prefill, "paged_prefill"),
)


def make_attention(pool: KVPool, dtype: torch.dtype, *window_pool: KVPool, max_entries: int = 8) -> TritonAttention:
    """Make the Triton backend with room for all specs of the tests."""
    return TritonAttention([pool, *window_pool], dtype, AttentionLimits(HEADS, WINDOWS, max_entries, 512), SMALL)


def on_device(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with its tensors on the device."""
    names = ("input_ids", "positions", "out_cache_loc", "rows", "req_to_token", "logit_indices")
    pages = None if batch.window_pages is None else batch.window_pages.to(DEVICE)
    return replace(batch, window_pages=pages, **{name: getattr(batch, name).to(DEVICE) for name in names})


def poison(data: Tensor, batch: ForwardBatch, page_size: int) -> None:
    """NaN into all of a pool in token order that no row of the batch holds; into all bytes of a quantised one."""
    ends = [start + q_len for start, q_len in zip(batch.starts, batch.q_lens, strict=True)]
    held = torch.cat([batch.req_to_token[row, :end] for row, end in zip(batch.rows.tolist(), ends, strict=True)])
    is_held = torch.zeros(len(data) * page_size, dtype=torch.bool)
    is_held[held.long()] = True
    pages, offsets = (~is_held.view(-1, page_size)).nonzero(as_tuple=True)
    by_token = data.movedim(-3 if data.dim() == 6 else -2, 1)
    by_token[pages, offsets] = 0xFF if data.dtype == torch.uint8 else float("nan")


class Launches:
    """Runs kernels, and again as a graph would: the same launches, over the same addresses."""

    def __init__(self, patch: Callable[..., None]) -> None:
        """Record the launches of all kernels. ``patch``: ``monkeypatch.setattr``."""
        self.recorded: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        for module, name in KERNELS:
            patch(module, name, _Recorded(getattr(module, name), self.recorded))

    def replay(self) -> None:
        """Run what was recorded."""
        for kernel, grid, args, constants in self.recorded:
            kernel[grid](*args, **constants)


class _Recorded:
    def __init__(self, kernel: Any, into: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            self._into.append((self._kernel, grid, args, constants))
            self._kernel[grid](*args, **constants)

        return run
