"""Every attention backend against attention written out in float64, over random mixes of entries."""

from __future__ import annotations

from dataclasses import replace

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
from support.kv_pages import as_stored, make_pool_layout, values_of
from support.layouts import latent_layout, uniform_layout

from pdserve.model_runner.attention import torch_backend
from pdserve.model_runner.attention.registry import BackendNeeds, make_attention_backend
from pdserve.model_runner.kv.pool import MHATokenToKVPool, MLATokenToKVPool

BACKENDS = ["torch"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sample(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float32, torch.int8, 1e-5),
        (torch.float32, torch.float8_e4m3fn, 1e-5),
        (torch.float32, torch.float8_e5m2, 1e-5),
        (torch.bfloat16, torch.int8, 2e-2),
    ],
)
@pytest.mark.parametrize(
    ("starts", "q_lens"),
    [
        ([0], [1]),
        ([31, 0, 15, 16, 90], [1, 1, 1, 1, 1]),
        ([0, 130], [150, 260]),
        ([7, 40, 0, 63, 17], [9, 1, 33, 1, 128]),
    ],
    ids=["first token", "decodes", "long chunks", "mixed"],
)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "specs",
    [
        ("plain", "scaled"),
        ("window", "window of one"),
        ("capped", "capped window"),
        ("sinks", "capped sinks in a window"),
    ],
)
def test_equals_float64(
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tolerance: float,
    starts: list[int],
    q_lens: list[int],
    page_size: int,
    specs: tuple[str, str],
) -> None:
    """Each layer has a spec of its own."""
    torch.manual_seed(11)
    pool = MHATokenToKVPool(make_pool_layout(page_size, LAYERS, KV_HEADS, DIM, kv_dtype), PAGES, torch.device("cpu"))
    pool.data[1:] = as_stored(torch.randn(PAGES - 1, LAYERS, 2, page_size, KV_HEADS, DIM), pool)
    batch = make_batch(starts, q_lens, page_size)
    attention = make_attention_backend(backend, BackendNeeds([pool], dtype))
    attention.plan(batch)
    total = sum(q_lens)
    for layer in range(LAYERS):
        q, k, v = (torch.randn(total, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        before = pool.data.clone()
        spec = SPECS[specs[layer]]
        sinks = torch.randn(HEADS) + 1 if spec.sinks else None
        out = attention.forward(layer, q, k, v, spec, sinks)
        pages, offsets = batch.out_cache_loc // page_size, batch.out_cache_loc % page_size
        before[pages, layer, 0, offsets], before[pages, layer, 1, offsets] = as_stored(k, pool), as_stored(v, pool)
        assert torch.equal(pool.data, before), "exactly this pass's slots are written"
        expected = attend_in_float64(batch, values_of(pool), layer, q, spec, sinks)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        assert out.shape == (total, HEADS * DIM)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("starts", "q_lens"), [([31, 0, 15], [1, 1, 1]), ([7, 40, 0, 130], [9, 1, 150, 1])])
@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_rows_are_keys_and_values(
    dtype: torch.dtype, tolerance: float, starts: list[int], q_lens: list[int], page_size: int
) -> None:
    torch.manual_seed(11)
    dim, total = LATENT.head_dim, sum(q_lens)
    layout = latent_layout(page_size, LAYERS, dim, str(dtype).removeprefix("torch."), 0, value_dim=DIM)
    pool = MLATokenToKVPool(layout, PAGES, torch.device("cpu"))
    pool.data[1:] = torch.randn_like(pool.data[1:])
    batch = make_batch(starts, q_lens, page_size)
    attention = make_attention_backend("torch", BackendNeeds([pool], dtype))
    attention.plan(batch)
    for layer in range(LAYERS):
        q, rows = torch.randn(total, HEADS, dim).to(dtype), torch.randn(total, 1, dim).to(dtype)
        expected = pool.data.clone()
        out = attention.forward(layer, q, rows, rows[..., :DIM], LATENT)
        expected[batch.out_cache_loc // page_size, layer, batch.out_cache_loc % page_size] = rows[:, 0]
        assert torch.equal(pool.data, expected), "exactly this pass's slots are written"
        # Keys and values by themselves, which the reference knows, are those rows twice.
        kept = torch.stack((pool.data, pool.data), 2)[:, :, :, :, None].expand(-1, -1, -1, -1, KV_HEADS, -1)
        plain = replace(PLAIN, scale=LATENT.scale)
        whole = attend_in_float64(batch, kept, layer, q, plain, None).view(total, HEADS, dim)[..., :DIM]
        torch.testing.assert_close(out.double(), whole.flatten(1), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("q_lens", [[1] * 6, [1, 1, 9, 1, 1, 1]], ids=["decodes", "mixed"])
def test_torch_gathers_contexts_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch, q_lens: list[int]) -> None:
    """Contexts of many rows are gathered in pieces, and the result does not depend on that."""
    batch, page_size = make_batch([31, 20, 2, 100, 7, 30], q_lens, 4), 4
    pool = MHATokenToKVPool(
        make_pool_layout(page_size, LAYERS, KV_HEADS, DIM, torch.float32), PAGES, torch.device("cpu")
    )
    pool.data.normal_()
    q, k, v = (torch.randn(batch.num_tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found, gathered = [], []
    gather = pool.gather

    def noted(layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered.append(len(pages) * page_size)
        return gather(layer, pages)

    monkeypatch.setattr(pool, "gather", noted)
    for most in (torch_backend.MOST_LANES, 64):
        monkeypatch.setattr(torch_backend, "MOST_LANES", most)
        gathered.clear()
        attention = make_attention_backend("torch", BackendNeeds([pool], torch.float32))
        attention.plan(batch)
        found.append(attention.forward(0, q, k, v, SPECS["window"]))
    # One context is longer than the bound, and is gathered by itself.
    assert max(gathered) <= 104
    assert len(gathered) > 2
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)


def test_unknown_backend_is_named() -> None:
    layout = uniform_layout(4, 1, 1, 2, "float32", 0)
    pool = MHATokenToKVPool(layout, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="no attention backend 'magic'; there are torch"):
        make_attention_backend("magic", BackendNeeds([pool], torch.float32))
