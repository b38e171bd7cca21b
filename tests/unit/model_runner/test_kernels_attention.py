"""The CPU attention kernel against attention written out in float64, and against itself in other company.

Pools are made in token order, for the reference, and given to the kernel in its own order.

Shapes: T tokens, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv_pages import as_stored, in_order, make_pool_layout, values_of
from torch import Tensor

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import levels_here
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.kv.pool import MHATokenToKVPool

pytestmark = pytest.mark.skipif(not levels_here(), reason="this processor can't run the kernels")

LAYERS = 2
# Standard normal values average to at most about 4. float32 sums a few hundred products; bfloat16 rounds the weights
# and the result to 8 bits. What was rounded to a byte is compared with what it became.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BYTES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
TOLERANCES = TOLERANCE | dict.fromkeys(BYTES, 1e-5)
"""Tolerances by type of the pool. Queries are float32 if elements are bytes."""
PAGE_SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 512]
SHAPES = [(6, 2, 16), (9, 3, 64), (8, 1, 128), (4, 4, 80), (14, 2, 48)]
PASSES = {
    "first token": ([0], [1]),
    "decodes": ([31, 0, 15, 16, 90, 300], [1] * 6),
    "long chunks": ([0, 130], [150, 260]),
    "mixed": ([7, 40, 0, 63, 17, 255, 256], [9, 1, 33, 1, 128, 1, 1]),
    "one long context": ([1500], [1]),
    "few tokens on a long context": ([700], [5]),
}


class Case(NamedTuple):
    pool: MHATokenToKVPool
    batch: ForwardBatch
    q_THD: Tensor


def make_case(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    page_size: int,
    starts: list[int],
    q_lens: list[int],
    q_dtype: torch.dtype | None = None,
) -> Case:
    """Make a case of random keys and values on random pages. Every slot that no row maps holds NaN."""
    q_dtype = q_dtype or (torch.float32 if dtype in BYTES else dtype)
    heads, kv_heads, dim = shape
    ends = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
    num_pages = sum(-(-end // page_size) for end in ends) + 1
    layout = make_pool_layout(page_size, LAYERS, kv_heads, dim, dtype)
    pool = MHATokenToKVPool(layout, num_pages, torch.device("cpu"))
    forget(pool)
    free = (torch.randperm(num_pages - 1) + 1).tolist()
    table = torch.full((len(starts) + 1, max(ends)), 10**9, dtype=torch.int32)
    for row, end in enumerate(ends, 1):
        for first in range(0, end, page_size):
            count, page = min(page_size, end - first), free.pop()
            table[row, first : first + count] = page * page_size + torch.arange(count, dtype=torch.int32)
            drawn = torch.randn(LAYERS, 2, count, kv_heads, dim)
            pool.data[page, :, :, :count] = as_stored(drawn, pool)
    empty = torch.empty(0, dtype=torch.int64)
    rows = torch.arange(1, len(starts) + 1)
    batch = ForwardBatch(empty, empty, empty, rows, starts, q_lens, table, empty)
    return Case(pool, batch, torch.randn(sum(q_lens), heads, dim).to(q_dtype))


def forget(pool: MHATokenToKVPool) -> None:
    """Put NaN everywhere: bytes with all bits set are NaN as scales, and except for int8 as elements."""
    pool.data.fill_(0xFF if pool.is_quantized else float("nan"))


def spread(rows: Tensor, gap: int) -> Tensor:
    """Return the rows [T, …] with ``gap`` NaN before each, as in a buffer that holds more than them."""
    wide = torch.full((len(rows), rows[0].numel() + gap), float("nan"), dtype=rows.dtype)
    wide[:, gap:] = rows.flatten(1)
    return wide[:, gap:].unflatten(1, rows.shape[1:])


class Rule(NamedTuple):
    """What a layer's attention may differ in; see ``AttentionSpec``."""

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


PLAIN = Rule()


def attend(
    case: Case, layer: int = 1, threads: int = 1, passes: int = 1, out_gap: int = 0, rule: Rule = PLAIN
) -> Tensor:
    """Return the kernel's result, [T, H, D]."""
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    pool = in_order(case.pool, "blocks")
    attention = PagedAttention(pool, case.q_THD.shape[1], Team(threads), **rule._asdict())
    out_THD = spread(torch.full_like(case.q_THD, float("nan")), out_gap)
    for _ in range(passes):
        attention.plan(case.batch)
        attention.run(layer, case.q_THD, out_THD)
        attention.run(layer, case.q_THD, out_THD)
    return out_THD


def attend_in_float64(case: Case, layer: int = 1, rule: Rule = PLAIN) -> Tensor:
    data, batch, q_THD = values_of(case.pool), case.batch, case.q_THD.double()
    page_size, group, first, outs = data.shape[3], q_THD.shape[1] // data.shape[4], 0, []
    for row, start, q_len in zip(batch.rows.tolist(), batch.starts, batch.q_lens, strict=True):
        slots = batch.req_to_token[row, : start + q_len].long()
        kv = data[slots // page_size, layer, :, slots % page_size]
        k, v = (kv[:, part].repeat_interleave(group, 1) for part in (0, 1))
        scores = torch.einsum("thd,shd->hts", q_THD[first : first + q_len], k) * (rule.scale or q_THD.shape[2] ** -0.5)
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        age = torch.arange(start, start + q_len)[:, None] - torch.arange(start + q_len)
        unseen = (age < 0) | (age >= (rule.window or start + q_len))
        outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v))
        first += q_len
    return torch.cat(outs)


@pytest.mark.sample(12)
@pytest.mark.parametrize("page_size", [1, 4, 16, 48])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PASSES)
def test_equals_float64_whatever_the_number_of_threads(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    torch.manual_seed(3)
    case = make_case(shape, dtype, page_size, *PASSES[name])
    out_THD = attend(case)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out_THD.double(), attend_in_float64(case), atol=tolerance, rtol=tolerance)
    for threads in (2, 3):
        assert torch.equal(attend(case, threads=threads, passes=2), out_THD)


@given(
    st.integers(0, 2**32),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(list(TOLERANCES)),
    st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([16, 32, 48, 64, 112, 128, 192])),
    st.sampled_from(PAGE_SIZES),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1, 1, 1, 2, 7, 64, 90])), min_size=1, max_size=6),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.integers(1, 3),
    st.builds(
        Rule,
        st.none() | st.integers(1, 600),
        # Times head_dim ** -0.5. Scores that are much larger than usual make of float32's rounding more than the limit.
        st.none() | st.floats(0.01, 2.0),
        st.none() | st.floats(0.5, 50.0),
    ),
)
@settings(max_examples=examples(50), deadline=None)
def test_equals_float64_for_random_sizes_and_strides(
    seed: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    sizes: tuple[int, int, int],
    page_size: int,
    spans: list[tuple[int, int]],
    gaps: tuple[int, int],
    threads: int,
    rule: Rule,
) -> None:
    """Queries and answers in wider buffers; types of the pool and of the activations that may differ."""
    torch.manual_seed(seed)
    group, kv_heads, dim = sizes
    rule = rule._replace(scale=None if rule.scale is None else rule.scale * dim**-0.5)
    starts, q_lens = (list(column) for column in zip(*spans, strict=True))
    case = make_case((group * kv_heads, kv_heads, dim), pool_dtype, page_size, starts, q_lens)
    case = case._replace(q_THD=spread(case.q_THD.to(dtype), gaps[0]))
    out_THD = attend(case, threads=threads, out_gap=gaps[1], rule=rule)
    tolerance = max(TOLERANCE[dtype], TOLERANCES[pool_dtype])
    torch.testing.assert_close(out_THD.double(), attend_in_float64(case, rule=rule), atol=tolerance, rtol=tolerance)


@pytest.mark.sample(10)
@pytest.mark.parametrize("window", [1, 2, 16, 127, 128, 129, 256, 257, 300, 10**6])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", PASSES)
def test_a_window_whatever_the_number_of_threads(name: str, dtype: torch.dtype, window: int) -> None:
    torch.manual_seed(3)
    case, rule = make_case((14, 2, 48), dtype, 16, *PASSES[name]), Rule(window=window)
    out_THD, exact = attend(case, rule=rule), attend_in_float64(case, rule=rule)
    torch.testing.assert_close(out_THD.double(), exact, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for threads in (2, 3):
        assert torch.equal(attend(case, threads=threads, passes=2, rule=rule), out_THD)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_far_behind_the_window_are_not_read(dtype: torch.dtype, threads: int) -> None:
    case, rule = make_case((6, 2, 16), dtype, 16, [1500], [4]), Rule(window=300)
    expected = attend(case, threads=threads, rule=rule)
    # Tiles are of 128 keys, and the first query sees those from 1201 on.
    slots = case.batch.req_to_token[1, :1152].long()
    case.pool.data[slots // 16, :, :, slots % 16] = 0xFF if case.pool.is_quantized else float("nan")
    assert torch.equal(attend(case, threads=threads, rule=rule), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", [PLAIN, Rule(window=200, softcap=3.0)])
@pytest.mark.parametrize(
    ("dtype", "q_dtype"),
    [*zip(TOLERANCE, TOLERANCE, strict=True), *itertools.product(BYTES, TOLERANCE)],
)
def test_a_token_is_the_same_to_the_last_bit_however_its_prompt_is_cut(
    dtype: torch.dtype, q_dtype: torch.dtype, rule: Rule
) -> None:
    """In one chunk, in many, or alone as a decode step, in a batch or not."""
    torch.manual_seed(5)
    length, (pool, batch, q_THD) = 700, make_case((9, 3, 64), dtype, 16, [0], [700], q_dtype)
    whole = attend(Case(pool, batch, q_THD), rule=rule)
    cuts = [0, *sorted(random.Random(1).sample(range(1, length), 12)), length]
    row = int(batch.rows[0])
    starts = cuts[:-1]
    q_lens = [end - start for start, end in zip(starts, cuts[1:], strict=True)]
    rows = torch.full((len(starts),), row)
    empty = torch.empty(0, dtype=torch.int64)
    chunks = ForwardBatch(empty, empty, empty, rows, starts, q_lens, batch.req_to_token, empty)
    assert torch.equal(attend(Case(pool, chunks, q_THD), threads=2, rule=rule), whole)
    for position in (0, 63, 64, 255, 256, 257, 511, 699):
        step = ForwardBatch(empty, empty, empty, rows[:1], [position], [1], batch.req_to_token, empty)
        alone = attend(Case(pool, step, q_THD[position : position + 1]), threads=2, rule=rule)
        assert torch.equal(alone[0], whole[position]), position


def test_nan_in_a_query_stays_in_its_row_and_scores_may_be_huge() -> None:
    torch.manual_seed(7)
    case = make_case((4, 2, 32), torch.float32, 16, [20, 30], [1, 1])
    case.q_THD[1] *= 1e4
    clean = attend(case)
    torch.testing.assert_close(clean.double(), attend_in_float64(case), atol=1e-3, rtol=1e-3)
    case.q_THD[0, 0, 0] = float("nan")
    broken = attend(case)
    assert broken[0, 0].isnan().all()
    assert torch.equal(broken[1], clean[1])


@pytest.mark.sample(7)
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("group", [13, 16, 24, 32])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rule", [PLAIN, Rule(window=300)])
def test_few_tokens_of_large_groups_on_a_long_context(dtype: torch.dtype, group: int, threads: int, rule: Rule) -> None:
    """A context that is split along its keys, and an entry with queries in several blocks, too."""
    torch.manual_seed(4)
    case = make_case((2 * group, 2, 32), dtype, 16, [600, 3, 300], [8, 1, 5])
    expected = attend(case, rule=rule)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(expected.double(), attend_in_float64(case, rule=rule), atol=tolerance, rtol=tolerance)
    for _ in range(3):
        assert torch.equal(attend(case, threads=threads, passes=3, rule=rule), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_below_the_normal_numbers_are_zero(dtype: torch.dtype) -> None:
    """They cost hundreds of cycles each otherwise; and the caller's own arithmetic keeps its denormal numbers."""
    case = make_case((2, 1, 16), dtype, 16, [255], [1])
    data, slots = case.pool.data, case.batch.req_to_token[1, :256].long()
    case.q_THD.fill_(1.0)
    data.zero_()
    # Scores of 95 and 0: weights of 1 and, but for that, 5e-42, of values that would make it show.
    data[slots // 16, :, 1, slots % 16] = 1e38
    data[slots[0] // 16, :, 0, slots[0] % 16] = 95 / 4
    data[slots[0] // 16, :, 1, slots[0] % 16] = 2**-14
    assert torch.equal(attend(case), torch.full((1, 2, 16), 2**-14, dtype=dtype))
    assert np.float32(1e-40) * np.float32(1) > 0


def test_store_keeps_nan_a_nan() -> None:
    """Whatever its bits: rounding must not carry it to infinity, or to zero."""
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    bits = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000, 0xFF80FFFF, 0x7F800000, 0x7F7FFFFF, 0x3F808000]
    k = torch.from_numpy(np.array(bits * 2, dtype=np.uint32).view(np.float32)).view(1, 1, 16)
    pool = MHATokenToKVPool(make_pool_layout(16, 1, 1, 16, torch.bfloat16, "blocks"), 2, torch.device("cpu"))
    PagedAttention(pool, 1, Team(1)).store(0, torch.tensor([17]), k, k)
    for part in range(2):
        stored = in_order(pool, "tokens").data[1, 0, part, 1].flatten().float()
        assert stored.isnan().tolist() == ([True] * 5 + [False] * 3) * 2
        assert stored[5:8].tolist() == [torch.inf, torch.inf, 1.0]


@given(
    st.integers(0, 2**32),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(list(TOLERANCES)),
    st.tuples(st.integers(1, 5), st.sampled_from([16, 48, 64]), st.sampled_from(PAGE_SIZES[:-1]), st.integers(1, 9)),
    st.integers(0, 40),
    st.integers(0, 1),
)
@settings(max_examples=examples(60), deadline=None)
def test_store_writes_its_slots_and_leaves_their_neighbours(
    seed: int, dtype: torch.dtype, pool_dtype: torch.dtype, sizes: tuple[int, int, int, int], gap: int, layer: int
) -> None:
    """Exact: a value is copied, or rounded once to the nearest. Rows may be further apart than they are wide.

    Of elements of one byte the torch engine writes the same bytes, whatever the heads' magnitudes.
    """
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    torch.manual_seed(seed)
    kv_heads, dim, page_size, pages = sizes
    layout = make_pool_layout(page_size, LAYERS, kv_heads, dim, pool_dtype)
    pool = MHATokenToKVPool(layout, pages + 1, torch.device("cpu"))
    if pool.is_quantized:
        pool.data.random_(0, 256)
    else:
        pool.data.normal_()
    ours = in_order(pool, "blocks")
    slots = torch.randperm(pages * page_size)[: 1 + seed % (pages * page_size)] + page_size
    magnitudes = torch.ones(2, len(slots), kv_heads, 1)
    if pool.is_quantized:
        # From next to nothing, which has no scale, to what is no number any more in the end.
        magnitudes = torch.where(torch.rand_like(magnitudes) < 0.7, 1.0, 10 ** magnitudes.uniform_(-42, 39))
    k, v = (spread((torch.randn(len(slots), kv_heads, dim) * one).to(dtype), gap) for one in magnitudes)
    for part, rows in enumerate((k, v)):
        pool.data[slots // page_size, layer, part, slots % page_size] = as_stored(rows, pool)
    PagedAttention(ours, kv_heads, Team(1)).store(layer, slots, k, v)
    stored = in_order(ours, "tokens").data
    assert torch.equal(*(data.view(torch.uint8) for data in (stored, pool.data)))


@pytest.mark.parametrize(
    ("dtype", "head", "expected"),
    [
        (torch.int8, [127.0, 0.5, 1.5, -2.5, -3.5, 126.5], [127, 0, 2, -2, -4, 126]),
        (torch.float8_e4m3fn, [448.0, 17.0, 19.0, -(2.0**-10), 3 * 2.0**-10, 432.0], [448, 16, 20, 0, 2**-8, 448]),
        (torch.float8_e5m2, [57344.0, 9.0, 11.0, -(2.0**-17), 3 * 2.0**-17, 10.0], [57344, 8, 12, 0, 2**-15, 10]),
    ],
)
def test_half_a_step_is_rounded_to_the_even_number(
    dtype: torch.dtype, head: list[float], expected: list[float]
) -> None:
    """Both engines round so. The largest number makes the scale 1."""
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    k = torch.zeros(1, 1, 16)
    k[0, 0, : len(head)] = torch.tensor(head)
    ours, theirs = (
        MHATokenToKVPool(make_pool_layout(16, 1, 1, 16, dtype, order), 2, torch.device("cpu"))
        for order in ("blocks", "tokens")
    )
    PagedAttention(ours, 1, Team(1)).store(0, torch.tensor([17]), k, k)
    theirs.store(0, theirs.token_rows(torch.tensor([17])), k, k)
    for pool in (in_order(ours, "tokens"), theirs):
        assert values_of(pool)[1, 0, :, 1, 0, : len(head)].tolist() == [expected, expected]


def test_pools_that_the_kernel_cannot_read_are_refused() -> None:
    from pdserve.model_runner.cpu_engine.attention import PagedAttention

    for size, dim, order, why in (
        (4, 8, "blocks", "multiple of 16"),
        (16, 16, "tokens", "in blocks"),
        (24, 16, "blocks", "pages of 24"),
    ):
        pool = MHATokenToKVPool(make_pool_layout(size, 1, 1, dim, torch.float32, order), 2, torch.device("cpu"))
        with pytest.raises(ValueError, match=why):
            PagedAttention(pool, 1, Team(1))
