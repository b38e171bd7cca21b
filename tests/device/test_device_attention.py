"""Triton's attention against attention written out in float64, and what it promises beyond that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_reference import (
    DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    LAYERS,
    PAGES,
    PLAIN,
    SPECS,
    attend_in_float64,
    make_batch,
)
from support.attention_rig import Launches, make_attention, on_device, poison
from support.kv_pages import as_stored, make_pool_layout, values_of
from support.layouts import latent_layout, uniform_layout
from support.triton_device import DEVICE, INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.model_runner.attention.kv_indices import kv_indices
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.attention.triton.attention_plan import PlannedRows, RowArrays, TableOfPass, fill_rows
from pdserve.model_runner.attention.triton.pool_views import layer_views
from pdserve.model_runner.attention.triton.store_kv import store_kv
from pdserve.model_runner.attention.triton.tiles import split_tokens
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.batch.step_plan import paged_indices
from pdserve.model_runner.kv.pool import MHATokenToKVPool, MLATokenToKVPool
from pdserve.model_runner.kv.quantization import LARGEST, pack_heads

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIXED = ([7, 40, 0, 63, 70], [9, 1, 25, 1, 30])
DECODES = ([31, 0, 15, 16, 190], [1, 1, 1, 1, 1])
ALL_SPECS = list(SPECS)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's products, unlike those of tensor cores, round a row by where it stands among the others."""
    matmul = np.matmul
    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: matmul(a, b, dtype=np.float64).astype(dtype))


def make_pool(page_size: int, dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(make_pool_layout(page_size, LAYERS, KV_HEADS, DIM, dtype), PAGES, DEVICE)


def draw_pass(total: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(total, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))


@pytest.mark.parametrize(
    ("rows", "dtype", "kv_dtype", "page_size", "specs"),
    [
        (MIXED, F32, F32, 16, ["plain", "capped sinks in a window"]),
        (DECODES, BF16, BF16, 1, ["plain", "capped window"]),
        (DECODES, BF16, E4M3, 16, ["plain", "capped"]),
        *(
            pytest.param(rows, dtype, kv_dtype, page_size, ALL_SPECS[i : i + 2], marks=pytest.mark.slow)
            for rows, dtype, kv_dtype, page_size in (
                (([0], [1]), F32, F32, 16),
                (([0, 130], [150, 200]), F32, F32, 16),
                *((rows, F32, kv, 16) for rows in (MIXED, DECODES) for kv in (F32, INT8, E4M3, E5M2, BF16)),
                *((rows, F32, F32, size) for rows in (MIXED, DECODES) for size in (1, 3)),
                *((rows, BF16, kv, 16) for rows in (MIXED, DECODES) for kv in (BF16, INT8)),
                *((rows, F16, kv, 16) for rows in (MIXED, DECODES) for kv in (F16, E5M2)),
            )
            for i in range(0, len(ALL_SPECS), 2)
        ),
    ],
)
def test_equals_float64(
    rows: tuple[list[int], list[int]],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    specs: list[str],
) -> None:
    """Each layer has a spec of its own. What no row holds is NaN."""
    torch.manual_seed(11)
    batch, pool = make_batch(*rows, page_size), make_pool(page_size, kv_dtype)
    data = as_stored(torch.randn(PAGES, LAYERS, 2, page_size, KV_HEADS, DIM), pool)
    poison(data, batch, page_size)
    pool.data.copy_(data)
    attention = make_attention(pool, dtype, max_entries=2 if len(rows[0]) > 4 else 8)
    attention.plan(on_device(batch))
    tolerance = {F32: 1e-5, F16: 4e-3, BF16: 2e-2}[dtype]
    for layer in range(LAYERS):
        q, k, v = draw_pass(sum(rows[1]), dtype)
        spec = SPECS[specs[layer]]
        sinks = torch.randn(HEADS) + 1 if spec.sinks else None
        there = None if sinks is None else sinks.to(DEVICE)
        out = attention.forward(layer, q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), spec, there).cpu()
        pages, offsets = batch.out_cache_loc // page_size, batch.out_cache_loc % page_size
        data[pages, layer, 0, offsets], data[pages, layer, 1, offsets] = as_stored(k, pool), as_stored(v, pool)
        assert torch.equal(pool.data.cpu().view(torch.uint8), data.view(torch.uint8)), "exactly its slots are written"
        expected = attend_in_float64(batch, values_of(pool, data), layer, q, spec, sinks)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (F32, MIXED),
        pytest.param(BF16, DECODES, marks=pytest.mark.slow),
        pytest.param(BF16, MIXED, marks=pytest.mark.slow),
    ],
)
def test_latent_rows_are_keys_and_values(dtype: torch.dtype, rows: tuple[list[int], list[int]]) -> None:
    torch.manual_seed(11)
    dim, total, page_size = LATENT.head_dim, sum(rows[1]), 16
    layout = latent_layout(page_size, LAYERS, dim, str(dtype).removeprefix("torch."), 0, value_dim=DIM)
    pool = MLATokenToKVPool(layout, PAGES, DEVICE)
    batch, data = make_batch(*rows, page_size), torch.randn(pool.data.shape).to(dtype)
    poison(data, batch, page_size)
    pool.data.copy_(data)
    attention = make_attention(pool, dtype)
    attention.plan(on_device(batch))
    q, latents = torch.randn(total, HEADS, dim).to(dtype), torch.randn(total, 1, dim).to(dtype)
    out = attention.forward(1, q.to(DEVICE), latents.to(DEVICE), latents[..., :DIM].to(DEVICE), LATENT).cpu()
    data[batch.out_cache_loc // page_size, 1, batch.out_cache_loc % page_size] = latents[:, 0]
    assert torch.equal(pool.data.cpu().view(torch.uint8), data.view(torch.uint8)), "exactly its slots are written"
    # Keys and values by themselves, which the reference knows, are those rows twice.
    kept = torch.stack((data, data), 2)[:, :, :, :, None].expand(-1, -1, -1, -1, KV_HEADS, -1)
    whole = attend_in_float64(batch, kept, 1, q, replace(PLAIN, scale=LATENT.scale), None).view(total, HEADS, dim)
    tolerance = 1e-5 if dtype == F32 else 2e-2
    torch.testing.assert_close(out.double(), whole[..., :DIM].flatten(1), atol=tolerance, rtol=tolerance)


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    """Pages behind the window lead to one that is NaN."""
    torch.manual_seed(5)
    layout = uniform_layout(4, 1, KV_HEADS, DIM, "float32", 0, window=37)
    kept, windowed = (MHATokenToKVPool(layout, PAGES, torch.device("cpu"), group=group) for group in (0, 1))
    for pool in (kept, windowed):
        pool.data.normal_()
    batch = make_batch(*MIXED, 4)
    batch.window_pages = torch.randperm(PAGES - 2).add(2)[torch.arange(PAGES) % (PAGES - 2)].to(torch.int32)
    q, k, v = draw_pass(sum(MIXED[1]), F32)
    reference = TorchAttention([kept, windowed], F32)
    reference.plan(batch)
    spec = replace(PLAIN, window=37)
    expected = [reference.forward(0, q, k, v, PLAIN), reference.forward(1, q, k, v, spec)]

    for row, start in zip(batch.rows.tolist(), batch.starts, strict=True):
        behind = batch.req_to_token[row, : max(0, start + 1 - 37) // 4 * 4] // 4
        batch.window_pages[behind.long()] = 1
    windowed.data[1] = torch.nan
    pools = [MHATokenToKVPool(layout, PAGES, DEVICE, group=group) for group in (0, 1)]
    for pool, filled in zip(pools, (kept, windowed), strict=True):
        pool.data.copy_(filled.data)
    attention = make_attention(pools[0], F32, pools[1])
    attention.plan(on_device(batch))
    there = [x.to(DEVICE) for x in (q, k, v)]
    torch.testing.assert_close(attention.forward(0, *there, PLAIN).cpu(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention.forward(1, *there, spec).cpu(), expected[1], atol=1e-5, rtol=1e-5)


def split_batch(batch: ForwardBatch, wanted: list[int]) -> tuple[ForwardBatch, torch.Tensor]:
    """Return the batch of these entries alone, and which of its tokens they are."""
    ends = np.cumsum(batch.q_lens)
    tokens = torch.cat([torch.arange(ends[b] - batch.q_lens[b], ends[b]) for b in wanted])
    return replace(
        batch,
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        out_cache_loc=batch.out_cache_loc[tokens],
        rows=batch.rows[torch.tensor(wanted)],
        starts=[batch.starts[b] for b in wanted],
        q_lens=[batch.q_lens[b] for b in wanted],
    ), tokens


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("spec", ["capped sinks in a window", pytest.param("plain", marks=pytest.mark.slow)])
def test_company_changes_no_bit(spec: str) -> None:
    torch.manual_seed(3)
    batch, pool = make_batch(*MIXED, 16), make_pool(16, F32)
    pool.data.normal_()
    q, k, v = draw_pass(sum(MIXED[1]), F32)
    sinks = torch.randn(HEADS).to(DEVICE)
    attention = make_attention(pool, F32)

    def run(part: ForwardBatch, tokens: torch.Tensor) -> torch.Tensor:
        attention.plan(on_device(part))
        inputs = (x[tokens].to(DEVICE) for x in (q, k, v))
        return attention.forward(0, *inputs, SPECS[spec], sinks).cpu()

    together = run(batch, torch.arange(len(q)))
    for wanted in ([3], [4, 1], [0]):
        alone, tokens = split_batch(batch, wanted)
        assert torch.equal(run(alone, tokens), together[tokens])


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("spec", ["window", pytest.param("plain", marks=pytest.mark.slow)])
def test_how_a_prompt_is_cut_changes_no_bit(spec: str) -> None:
    torch.manual_seed(3)
    whole, pool = make_batch([3], [80], 16), make_pool(16, F32)
    pool.data.normal_()
    q, k, v = draw_pass(80, F32)
    attention = make_attention(pool, F32)

    def run(begin: int, end: int) -> torch.Tensor:
        part = replace(
            whole,
            positions=whole.positions[begin:end],
            out_cache_loc=whole.out_cache_loc[begin:end],
            starts=[3 + begin],
            q_lens=[end - begin],
        )
        attention.plan(on_device(part))
        return attention.forward(0, *(x[begin:end].to(DEVICE) for x in (q, k, v)), SPECS[spec]).cpu()

    uncut = run(0, 80)
    assert torch.equal(torch.cat([run(0, 27), run(27, 29), run(29, 80)]), uncut)


@pytest.mark.parametrize("kv_dtype", list(LARGEST))
def test_stored_bytes_are_the_hosts(kv_dtype: torch.dtype) -> None:
    """The bytes are the same for ordinary heads, and for heads with a scale of zero or almost zero."""
    torch.manual_seed(2)
    tokens, slots = 96, torch.randperm(PAGES)[:96] * 4 + 3
    k, v = (torch.randn(tokens, KV_HEADS, DIM) * torch.logspace(-30, 30, tokens)[:, None, None] for _ in range(2))
    k[0], k[1], k[2, 0, 3], k[3, 1, 2], v[4] = 0.0, 1e-39, torch.inf, torch.nan, 3e38
    # Halfway between two steps, and where steps become equal.
    v[5:37] = torch.linspace(0, 1, 1024).reshape(32, KV_HEADS, DIM) * torch.tensor([1.0, 2.0**-12])[:, None]
    v[5:37, :, 0] = 448.0 if kv_dtype == E4M3 else (127.0 if kv_dtype == INT8 else 1.0)
    v[37:47] = (torch.arange(320).reshape(10, KV_HEADS, DIM) - 160) / 2
    v[37:47, :, 0] = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}[kv_dtype]
    pool = make_pool(4, kv_dtype)
    views = layer_views(pool)[1]
    store_kv(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), views)
    written = pool.data.cpu()[slots // 4, 1, :, slots % 4]
    expected = torch.stack((pack_heads(k, kv_dtype), pack_heads(v, kv_dtype)), 1)
    # A NaN is one whatever its bits, which devices choose.
    scales, wanted = (x[..., DIM:].contiguous().view(F32) for x in (written, expected))
    torch.testing.assert_close(scales, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(written[..., :DIM], expected[..., :DIM])


def test_plans_are_those_of_the_host() -> None:
    torch.manual_seed(1)
    batch, windows, page_size = make_batch([7, 0, 210, 63], [1, 1, 1, 1], 4), (0, 37), 4
    batch.window_pages = torch.randperm(PAGES).to(torch.int32)
    there = on_device(batch)
    arrays = RowArrays.make(6, 400, torch.tensor(windows, dtype=torch.int32, device=DEVICE), True)
    entries = torch.tensor([2, 0, 3], dtype=torch.int32, device=DEVICE)
    table = TableOfPass(there.positions, there.rows, there.req_to_token, there.window_pages)
    fill_rows(arrays, PlannedRows(entries, entries), table, page_size, 16, 8)

    kv_lens = np.array(batch.starts)[[2, 0, 3]] + 1
    expected = paged_indices(kv_lens, page_size)
    indptr = torch.from_numpy(expected.kv_indptr)
    pages = kv_indices(batch.req_to_token, batch.rows[[2, 0, 3]].long(), indptr, expected.num_pages, page_size)
    assert arrays.kv_lens.cpu()[:3].tolist() == kv_lens.tolist()
    assert arrays.kv_indptr.cpu()[:4].tolist() == expected.kv_indptr.tolist()
    assert arrays.kv_indices.cpu()[: len(pages)].tolist() == pages.tolist()
    assert arrays.window_indices.cpu()[: len(pages)].tolist() == batch.window_pages[pages.long()].tolist()
    for which, window in enumerate(windows):
        seen = np.minimum(kv_lens, window) if window else kv_lens
        sizes = np.array([split_tokens(length, 16, 8) for length in seen.tolist()])
        assert arrays.split_sizes.cpu()[which, :3].tolist() == sizes.tolist()
        assert arrays.split_indptr.cpu()[which, :4].tolist() == [0, *np.cumsum(-(-seen // sizes)).tolist()]
    assert arrays.split_sizes.cpu()[0, 0] == 32, "a row of 211 tokens has no more than 8 splits"


class NobodyWaits(TorchDispatchMode):
    """Raises where a number is asked of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a number was asked of the device")
        return func(*args, **(kwargs or {}))


def test_launches_that_were_captured_serve_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph repeats launches with the arguments they had: only what lies at their addresses may change."""
    torch.manual_seed(8)
    pool = make_pool(16, F32)
    pool.data.normal_()
    first, second = make_batch([5, 0, 33], [1, 1, 1], 16), make_batch([70, 100, 2], [1, 1, 1], 16)
    attention, inputs = make_attention(pool, F32), [x.to(DEVICE) for x in draw_pass(3, F32)]
    specs = (SPECS["plain"], SPECS["window"])
    later = [x.to(DEVICE) for x in draw_pass(3, F32)]
    attention.plan(on_device(second))
    expected = [attention.forward(layer, *later, spec).clone() for layer, spec in enumerate(specs)]

    graph = Launches(monkeypatch.setattr)
    with NobodyWaits():
        attention.plan(on_device(first))
        outs = [attention.forward(layer, *inputs, spec) for layer, spec in enumerate(specs)]
        attention.plan(on_device(second))
    for x, new in zip(inputs, later, strict=True):
        x.copy_(new)
    graph.replay()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)
