"""Pages, their checksum, and the request table, on a device: against numpy.

Shapes: P pages of the pool, N of a request, L layers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.triton_device import DEVICE, there

from pdserve.mem_cache.kv_pages.page_group import LayerRange
from pdserve.mem_cache.kv_pages.page_order import PageConverter
from pdserve.mem_cache.kv_pages.word_sum import host_checksum
from pdserve.messages.base import pack_i32
from pdserve.messages.worker import SlotDelta
from pdserve.model_runner.batch.step_arrays import DeviceArrays
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.triton.checksum import page_checksum
from pdserve.model_runner.kv.triton.pages import gather_pages, order_units, scatter_pages
from pdserve.model_runner.ops.torch_ops import TorchOps
from pdserve.model_runner.ops.triton.table import apply_step, plan_writes
from pdserve.model_runner.ops.triton_ops import TritonOps

PAGES = np.array([4, 1, 6, 2], dtype=np.int32)


def random_pool(pages: int, layers: int, layer_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (pages, layers, layer_bytes), dtype=np.uint8)


@pytest.mark.parametrize("layer_bytes", [8, 4096 * 8 + 24, 1030, 7])
@pytest.mark.parametrize("layers", [LayerRange(0, 3), LayerRange(1, 2)], ids=str)
def test_pages_are_gathered_and_scattered(layer_bytes: int, layers: LayerRange) -> None:
    pool = random_pool(8, 3, layer_bytes)
    part = slice(*layers)
    staging = there(np.zeros(pool[PAGES][:, part].nbytes + 16, dtype=np.uint8))
    gather_pages(there(pool), there(PAGES), layers, 3, staging[:-16])
    assert np.array_equal(staging[:-16].cpu().numpy(), pool[PAGES][:, part].ravel())
    assert not staging[-16:].any()
    other = there(np.zeros_like(pool))
    scatter_pages(other, there(PAGES), layers, 3, staging[:-16])
    expected = np.zeros_like(pool)
    expected[PAGES, part] = pool[PAGES, part]
    assert np.array_equal(other.cpu().numpy(), expected)
    with pytest.raises(ValueError, match="do not fit"):
        gather_pages(other, there(PAGES), layers, 3, staging[: len(PAGES)])


@pytest.mark.parametrize(
    ("dtype", "latent"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.int8, None), (torch.bfloat16, 16)],
    ids=str,
)
@pytest.mark.parametrize("size", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_pages_change_their_order_on_the_way(dtype: torch.dtype, latent: int | None, size: int) -> None:
    shape = KVShape(3, 1 if latent else 2, 24, latent)
    blocks, tokens = (make_layout(shape, size, dtype, order) for order in ("blocks", "tokens"))
    page_bytes = blocks.groups[0].page_bytes
    pool = random_pool(8, 3, page_bytes // 3)
    expected = pool.reshape(8, -1)[PAGES].copy()
    for page in expected:
        PageConverter(blocks, "tokens").convert(page)
    staging = there(np.zeros(expected.size, dtype=np.uint8))
    gather_pages(there(pool), there(PAGES), LayerRange(0, 3), 3, staging, there(order_units(blocks, "tokens")))
    assert np.array_equal(staging.cpu().numpy(), expected.ravel())
    back = there(pool)
    back[there(PAGES).long()] = 0
    scatter_pages(back, there(PAGES), LayerRange(0, 3), 3, staging, there(order_units(tokens, "blocks")))
    assert np.array_equal(back.cpu().numpy(), pool)


def checksum(pool: np.ndarray, pages: np.ndarray, layers: LayerRange) -> int:
    out = torch.full((1,), 5, device=DEVICE)
    page_checksum(there(pool), there(pages), layers, pool.shape[1], out)
    return int(out.item()) % 2**64


@pytest.mark.parametrize("layers", [LayerRange(0, 3), LayerRange(1, 3)], ids=str)
@pytest.mark.parametrize("layer_bytes", [8, 4096 * 8 + 24])
def test_the_host_computes_the_same_checksum_in_whatever_parts(layer_bytes: int, layers: LayerRange) -> None:
    pool = random_pool(8, 3, layer_bytes)
    ours = checksum(pool, PAGES, layers)
    data = np.ascontiguousarray(pool[PAGES, layers.begin : layers.end]).ravel()
    assert ours == host_checksum(data)
    cut = len(data) // 16 * 8
    assert ours == (host_checksum(data[:cut]) + host_checksum(data[cut:], cut // 8)) % 2**64


def test_the_checksum_is_as_documented() -> None:
    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    words = [1, 2**64 - 1, 0]
    expected = sum(mixed((word + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i, word in enumerate(words)) % 2**64
    assert checksum(
        np.array(words, dtype=np.uint64).view(np.uint8).reshape(1, 1, 24), np.array([0]), LayerRange(0, 1)
    ) == (expected)


def test_the_checksum_tells_every_flipped_bit_and_what_has_changed_places() -> None:
    pool, layers = random_pool(8, 2, 64), LayerRange(0, 2)
    data = pool[PAGES].ravel()
    right = host_checksum(data)
    for bit in range(8 * len(data)):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert host_checksum(flipped) != right
    rng = np.random.default_rng(1)
    for _ in range(500):
        words = data.view(np.uint64).copy()
        chosen = rng.choice(len(words), 2, replace=False)
        words[chosen] = words[chosen[::-1]] if rng.random() < 0.5 else rng.integers(0, 2**64, 2, dtype=np.uint64)
        assert host_checksum(words.view(np.uint8)) != right
    assert checksum(pool, PAGES, layers) == right
    assert checksum(pool, PAGES[::-1].copy(), layers) != right
    assert host_checksum(np.roll(data, 8)) != right
    zeros = [host_checksum(np.zeros(8 * n, dtype=np.uint8)) for n in range(50)]
    assert len(set(zeros)) == 50
    # One of the pool's bits, through the kernel.
    pool[6, 1, 5] ^= 4
    assert checksum(pool, PAGES, layers) != right


def test_parts_that_are_no_whole_words_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiples of 8"):
        checksum(random_pool(2, 3, 4), np.array([1]), LayerRange(0, 1))


@pytest.mark.parametrize("seed", [0, 3])
def test_a_step_s_changes_are_those_of_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 99, (6, 40)).astype(np.int32)
    deltas = [
        SlotDelta(int(rng.integers(1, 3)), int(rng.integers(0, 20)), pack_i32(rng.integers(0, 99, 15).tolist()))
        for _ in range(seed)
    ]
    rows, positions = np.array([1, 2, 5]), np.array([7, 39, 0])
    slots, last = rng.integers(0, 99, 3), rng.integers(0, 99, 6)
    input_ids, windows = rng.integers(0, 99, 10), rng.integers(0, 99, 30).astype(np.int32)
    pages = np.array([[3, 8], [0, 0], [29, 1]], dtype=np.int32)
    there_table, there_ids, there_windows = there(table), there(input_ids), there(windows)
    writes = plan_writes(deltas, rows, positions, slots, 40)
    apply_step(
        there_table,
        *(there(column) for column in writes),
        there_ids,
        there(last),
        there(np.array([0, 0, 9])),
        there(np.array([4, -1, 2])),
        there_windows,
        there(pages),
    )
    for delta in deltas:
        moved = np.frombuffer(delta.slots, dtype="<i4")
        table[delta.row, delta.start : delta.start + len(moved)] = moved
    table[rows, positions] = slots
    input_ids[[0, 9]] = last[[4, 2]]
    windows[pages[:, 0]] = pages[:, 1]
    for ours, expected in ((there_table, table), (there_ids, input_ids), (there_windows, windows)):
        assert np.array_equal(ours.cpu().numpy(), expected)


def test_arrays_of_a_graph_are_filled_up_by_rows_of_minus_one() -> None:
    table, ids, none = there(np.zeros((2, 4), np.int32)), there(np.full(3, 7)), there(np.array([-1, -1]))
    apply_step(table, none, none, none, ids, there(np.array([5, 6])), none, none)
    assert not table.any()
    assert ids.tolist() == [7, 7, 7]


@pytest.mark.parametrize("last", [0, 2])
def test_a_pass_s_tokens_enter_the_table_as_by_torch(last: int) -> None:
    rng = np.random.default_rng(last)
    step = {name: np.zeros(0, np.int64) for name in DeviceArrays._fields}
    step |= {"token_rows": np.array([3, 3, 0, 5]), "positions": np.array([7, 8, 39, 0])}
    step |= {"out_cache_loc": rng.integers(0, 99, 4), "input_ids": rng.integers(0, 99, 4)}
    step |= {"last_at": np.array([2, 3])[:last], "last_rows": np.array([0, 5])[:last]}
    table, tokens = rng.integers(0, 99, (6, 40)).astype(np.int32), rng.integers(100, 200, 6)
    found = []
    for ops in (TritonOps(), TorchOps()):
        arrays, rows = DeviceArrays(**{name: there(array) for name, array in step.items()}), there(table)
        ops.enter(arrays, rows, there(tokens))
        found.append((rows.cpu().tolist(), arrays.input_ids.tolist()))
    assert found[0] == found[1]
    assert (np.array(found[0][0]) != table).sum() >= 3
    assert sum(token >= 100 for token in found[0][1]) == last
