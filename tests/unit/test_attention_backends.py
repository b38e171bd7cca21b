"""Every attention backend against attention written out in float64, over random mixes of entries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kv_pages import as_stored, make_pool_layout, values_of
from support.layouts import uniform_layout

from pdserve.model_files.spec import AttentionSpec
from pdserve.model_runner.attention.registry import make_attention_backend
from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.kv_pool import MHATokenToKVPool

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
    batch: ForwardBatch, data: torch.Tensor, layer: int, q: torch.Tensor, spec: AttentionSpec
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
            weights = scores.softmax(-1)
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
@pytest.mark.parametrize("specs", [("plain", "scaled"), ("window", "window of one"), ("capped", "capped window")])
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
    attention = make_attention_backend(backend, pool, dtype)
    attention.plan(batch)
    total = sum(q_lens)
    for layer in range(LAYERS):
        q, k, v = (torch.randn(total, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        before = pool.data.clone()
        spec = SPECS[specs[layer]]
        out = attention.forward(layer, q, k, v, spec)
        pages, offsets = batch.out_cache_loc // page_size, batch.out_cache_loc % page_size
        before[pages, layer, 0, offsets], before[pages, layer, 1, offsets] = as_stored(k, pool), as_stored(v, pool)
        assert torch.equal(pool.data, before), "exactly this pass's slots are written"
        expected = attend_in_float64(batch, values_of(pool), layer, q, spec)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        assert out.shape == (total, HEADS * DIM)


def test_unknown_backend_is_named() -> None:
    layout = uniform_layout(4, 1, 1, 2, "float32", 0)
    pool = MHATokenToKVPool(layout, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="no attention backend 'magic'; there is torch"):
        make_attention_backend("magic", pool, torch.float32)
