"""The CPU attention kernel over latent rows: against attention written out in float64, and against itself divided.

Shapes: T tokens, H query heads, D elements of a row, V of them the value.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kv_pages import in_order, make_latent_layout
from torch import Tensor

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.kv.pool import MLATokenToKVPool

pytestmark = pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")

LAYERS = 2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = {"6 heads": (6, 48, 32), "16 heads": (16, 80, 64), "32 heads": (32, 48, 16), "128 heads": (128, 576, 512)}
"""H, D, V."""
PASSES = {
    "first token": ([0], [1]),
    "mixed": ([7, 40, 0, 63, 255, 256], [9, 1, 33, 1, 1, 1]),
    "one long context": ([1100], [1]),
    "few tokens on a long context": ([700], [8]),
}


class Case(NamedTuple):
    pool: MLATokenToKVPool
    batch: ForwardBatch
    q_THD: Tensor


def make_case(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, starts: list[int], q_lens: list[int]
) -> Case:
    """Make a case of random rows on random pages. Every slot that no request maps holds NaN."""
    heads, dim, value_dim = shape
    torch.manual_seed(5)
    ends = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
    num_pages = sum(-(-end // page_size) for end in ends) + 1
    layout = make_latent_layout(page_size, LAYERS, dim, value_dim, dtype)
    pool = MLATokenToKVPool(layout, num_pages, torch.device("cpu"))
    pool.data.fill_(float("nan"))
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    table = torch.full((len(starts) + 1, max(ends)), 10**9, dtype=torch.int32)
    for row, end in enumerate(ends, 1):
        for first in range(0, end, page_size):
            count, page = min(page_size, end - first), free.pop()
            table[row, first : first + count] = page * page_size + torch.arange(count, dtype=torch.int32)
            pool.data[page, :, :count] = torch.randn(LAYERS, count, dim).to(dtype)
    empty = torch.empty(0, dtype=torch.int64)
    rows = torch.arange(1, len(starts) + 1)
    batch = ForwardBatch(empty, empty, empty, rows, starts, q_lens, table, empty)
    return Case(pool, batch, torch.randn(sum(q_lens), heads, dim).to(dtype))


def attend(case: Case, threads: int = 1) -> Tensor:
    """Return the kernel's result, [T, H, V]."""
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    pool, (tokens, heads, _) = in_order(case.pool, "blocks"), case.q_THD.shape
    attention = PagedAttention(pool, heads, Team(threads))
    out_THV = torch.full((tokens, heads, pool.group.value_dim), float("nan"), dtype=case.q_THD.dtype)
    for _ in range(2):
        attention.plan(case.batch)
        attention.run(1, case.q_THD, out_THV)
    return out_THV


def attend_in_float64(case: Case) -> Tensor:
    data, batch, q_THD = case.pool.data, case.batch, case.q_THD.double()
    page_size, first, outs = data.shape[2], 0, []
    for row, start, q_len in zip(batch.rows.tolist(), batch.starts, batch.q_lens, strict=True):
        slots = batch.req_to_token[row, : start + q_len].long()
        rows = data[slots // page_size, 1, slots % page_size].double()
        scores = torch.einsum("thd,sd->hts", q_THD[first : first + q_len], rows) * q_THD.shape[2] ** -0.5
        unseen = torch.arange(start, start + q_len)[:, None] < torch.arange(start + q_len)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hts,sv->thv", weights, rows[:, : case.pool.group.value_dim]))
        first += q_len
    return torch.cat(outs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("which", list(PASSES))
def test_equals_float64_and_itself_on_any_number_of_threads(
    which: str, shape: str, page_size: int, dtype: torch.dtype
) -> None:
    """Long contexts are split among threads, in blocks of queries where heads are many: each has its own place."""
    case = make_case(SHAPES[shape], dtype, page_size, *PASSES[which])
    out = attend(case)
    torch.testing.assert_close(out.double(), attend_in_float64(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for threads in (2, 4):
        assert torch.equal(attend(case, threads), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 48])
def test_store_writes_its_slots_and_leaves_their_neighbours(page_size: int, dtype: torch.dtype) -> None:
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    torch.manual_seed(3)
    pool = MLATokenToKVPool(make_latent_layout(page_size, LAYERS, 48, 32, dtype), 6, torch.device("cpu"))
    pool.data.normal_()
    ours = in_order(pool, "blocks")
    slots = torch.randperm(5 * page_size)[: 1 + 2 * page_size] + page_size
    rows = torch.randn(len(slots), 1, 48)
    pool.data[slots // page_size, 1, slots % page_size] = rows[:, 0].to(dtype)
    PagedAttention(ours, 6, Team(1)).store(1, slots, rows, rows)
    assert torch.equal(in_order(ours, "tokens").data, pool.data)
