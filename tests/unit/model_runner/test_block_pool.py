"""The C++ engine's pools of bytes: the same sizes, addresses and cleared bytes as torch's pools in their order."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from support.kv_pages import make_latent_layout, make_pool_layout
from support.passes import pool_bytes

from pdserve.messages.worker import KVLayout
from pdserve.model_runner.kv.block_pool import BlockPool
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import make_pool
from pdserve.model_runner.kv.pools import PoolPlan, make_pools

PAGES = 5
LAYOUTS = {
    "bfloat16": make_pool_layout(16, 3, 4, 32, torch.bfloat16, "blocks"),
    "float32, small pages": make_pool_layout(4, 2, 1, 16, torch.float32, "blocks"),
    "int8": make_pool_layout(16, 3, 4, 32, torch.int8, "blocks"),
    "latent": make_latent_layout(16, 3, 48, 32, torch.bfloat16, "blocks"),
}


@pytest.mark.parametrize("heads", [None, (1, 3)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_and_heads_lie_where_torch_has_them(name: str, heads: tuple[int, int] | None) -> None:
    layout = LAYOUTS[name]
    if heads is not None and layout.groups[0].kv_heads < heads[1]:
        heads = None
    ours, theirs = BlockPool(layout, PAGES, heads=heads), make_pool(layout, PAGES, torch.device("cpu"), heads=heads)
    assert (ours.nbytes, ours.num_pages, ours.head_bytes) == (theirs.nbytes, theirs.num_pages, theirs.head_bytes)
    assert ours.heads == theirs.heads
    for pool in (ours, theirs):
        pool_bytes(pool).fill_(0xFF)
    ours.clear(np.array([1, 3]))
    theirs.clear(torch.tensor([1, 3]))
    assert torch.equal(pool_bytes(ours), pool_bytes(theirs))
    assert not (ours.data == 0xFF).all()
    assert (ours.data[[0, 2, 4]] == 0xFF).all()


def test_a_pool_lies_where_its_buffer_does() -> None:
    layout = LAYOUTS["bfloat16"]
    memory = mmap.mmap(-1, PAGES * layout.page_bytes)
    pool = BlockPool(layout, PAGES, memory)
    assert pool.address == np.frombuffer(memory, dtype=np.uint8).ctypes.data
    memory[layout.page_bytes] = 7
    assert pool.data[1, 0, 0] == 7


def test_a_group_without_layers_has_pages_without_bytes() -> None:
    layout = make_layout(KVShape(2, 2, 16), 16, "float32", "blocks", windows={0: 20, 1: 20})
    kept, windowed = make_pools(layout, PoolPlan(PAGES, 0, 3), "cpu").blocks
    assert (kept.num_pages, kept.nbytes) == (PAGES, 0)
    kept.clear(np.array([1]))
    assert windowed.nbytes == 3 * layout.groups[1].page_bytes


@pytest.mark.parametrize(("order", "is_block"), [("blocks", True), ("tokens", False)])
def test_only_blocks_are_the_cpp_engines(order: str, is_block: bool) -> None:
    layout: KVLayout = make_pool_layout(16, 2, 2, 16, torch.float32, order)
    pools = make_pools(layout, PoolPlan(3), "cpu")
    assert (len(pools.blocks), len(pools.tensors)) == ((1, 0) if is_block else (0, 1))
