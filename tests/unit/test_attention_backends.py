"""Every attention backend against attention written out in float64, over random mixes of entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kv_pages import as_stored, make_pool_layout, values_of
from support.layouts import latent_layout, uniform_layout

from pdserve.model_files.spec import AttentionSpec, MLASpec, NormSpec
from pdserve.model_runner.attention.registry import BackendNeeds, make_attention_backend
from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.kv_pool import MHATokenToKVPool, MLATokenToKVPool

BACKENDS = ["torch"]
HEADS, KV_HEADS, DIM, LAYERS, PAGES = 6, 2, 16, 2, 700
PLAIN = AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
SPECS = {
    "plain": PLAIN,
    "scaled": replace(PLAIN, scale=0.4),
    "window": replace(PLAIN, window=37),
    "window of one": replace(PLAIN, window=1),
    "capped": replace(PLAIN, scale=0.5, softcap=1.5),
    "capped window": replace(PLAIN, window=5, softcap=2.0),
    "sinks": replace(PLAIN, sinks=True),
    "capped sinks in a window": replace(PLAIN, window=20, softcap=2.0, sinks=True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch(starts: list[int], q_lens: list[int], page_size: int) -> ForwardBatch:
    """Rows 1, 2, … over random pages; what a row does not map yet is out of every range."""
    free = (torch.randperm(PAGES - 1) + 1).tolist()
    table = torch.full((len(starts) + 1, 512), 10**9, dtype=torch.int32)
    locs, positions = [], []
    for row, (start, q_len) in enumerate(zip(starts, q_lens, strict=True), 1):
        for position in range(start + q_len):
            first = position % page_size == 0
            table[row, position] = free.pop() * page_size if first else table[row, position - 1] + 1
        positions.append(torch.arange(start, start + q_len))
        locs.append(table[row, start : start + q_len].long())
    return ForwardBatch(
        input_ids=torch.zeros(sum(q_lens), dtype=torch.int64),
        positions=torch.cat(positions),
        out_cache_loc=torch.cat(locs),
        rows=torch.arange(1, len(starts) + 1),
        starts=starts,
        q_lens=q_lens,
        req_to_token=table,
        logit_indices=torch.empty(0, dtype=torch.int64),
    )


def attend_in_float64(
    batch: ForwardBatch,
    data: torch.Tensor,
    layer: int,
    q: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``data`` is what the pool holds with this pass's KV stored."""
    page_size, out, first = data.shape[3], [], 0
    for row, start, q_len in zip(batch.rows.tolist(), batch.starts, batch.q_lens, strict=True):
        for i in range(q_len):
            begin = 0 if spec.window is None else max(0, start + i + 1 - spec.window)
            slots = batch.req_to_token[row, begin : start + i + 1].long()
            kv = data[slots // page_size, layer, :, slots % page_size].double()
            k, v = (kv[:, part].repeat_interleave(HEADS // KV_HEADS, 1) for part in (0, 1))
            scores = torch.einsum("hd,shd->hs", q[first + i].double(), k) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            shares = scores.exp()
            everything = shares.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None])
            weights = shares / everything
            out.append(torch.einsum("hs,shd->hd", weights, v).flatten())
        first += q_len
    return torch.stack(out)


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
    attention = make_attention_backend(backend, BackendNeeds(pool, dtype))
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


LATENT = MLASpec(
    heads=HEADS,
    q_lora_rank=None,
    kv_lora_rank=DIM,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=8,
    scale=0.3,
    norm=NormSpec(eps=1e-6),
)


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
    attention = make_attention_backend("torch", BackendNeeds(pool, dtype))
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


def test_unknown_backend_is_named() -> None:
    layout = uniform_layout(4, 1, 1, 2, "float32", 0)
    pool = MHATokenToKVPool(layout, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="no attention backend 'magic'; there are torch"):
        make_attention_backend("magic", BackendNeeds(pool, torch.float32))
