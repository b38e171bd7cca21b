"""The arrays of a step, against the obvious way to make them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.recording_device import RecordingDevice

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import ForwardStep, InputLogprobSpec
from pdserve.model_runner.attention.kv_indices import kv_indices
from pdserve.model_runner.batch.step_plan import paged_indices, plan_step


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_what_walking_the_entries_gives(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    rows = rng.sample(range(20), count)
    starts = [rng.randint(0, 90) for _ in rows]
    use_last = [rng.random() < 0.5 for _ in rows]
    q_lens = [1 if last else rng.randint(1, 30) for last in use_last]
    sample = [rng.random() < 0.6 for _ in rows]
    ids = [rng.randrange(1000) for _ in range(sum(q_lens))]
    slots = rng.sample(range(10_000), len(ids))
    scored = rng.randrange(count)
    specs = [InputLogprobSpec(scored, q_lens[scored] - 1, pack_i32([5]), 1)]
    plan = plan_step(
        ForwardStep(
            step_id=1,
            rows=pack_i32(rows),
            starts=pack_i32(starts),
            q_lens=pack_i32(q_lens),
            use_last=pack_i32(use_last),
            sample=pack_i32(sample),
            input_ids=pack_i32(ids),
            out_cache_loc=pack_i32(slots),
            input_logprobs=specs,
        ),
        page_size=16,
    )
    positions, token_rows, wanted, places, first = [], [], [], [], 0
    for row, start, q_len, last, samples in zip(rows, starts, q_lens, use_last, sample, strict=True):
        positions += range(start, start + q_len)
        token_rows += [row] * q_len
        if last:
            places.append((first, row))
            ids[first] = 0
        first += q_len
        if samples:
            wanted.append((first - 1, row, start + q_len))
    assert (plan.input_ids.tolist(), plan.positions.tolist()) == (ids, positions)
    assert (plan.token_rows.tolist(), plan.out_cache_loc.tolist()) == (token_rows, slots)
    assert list(zip(plan.last_at.tolist(), plan.last_rows.tolist(), strict=True)) == places
    end = sum(q_lens[: scored + 1])
    assert plan.logit_indices.tolist() == [at for at, _, _ in wanted] + [end - 1]
    ends = np.cumsum(q_lens)
    begun = []
    for start, q_len, after in zip(starts, q_lens, ends.tolist(), strict=True):
        last = start + q_len - 1
        if last % 16 != 15 and last // 16 * 16 >= start:
            begun.append(after - 1)
    assert plan.begun_at.tolist() == begun
    assert plan.is_decode == (q_lens == [1] * count)
    assert plan.sampled_rows.tolist() == [row for _, row, _ in wanted]
    assert plan.sampled_positions.tolist() == [position for _, _, position in wanted]


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_pages_are_where_the_table_says(page_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, width = int(rng.integers(1, 9)), 4 * 64
    table = torch.from_numpy(rng.integers(0, 999, (12, width // page_size)).astype(np.int32))
    tokens = table.repeat_interleave(page_size, 1) * page_size + torch.arange(width) % page_size
    rows, kv_lens = rng.permutation(12)[:count], rng.integers(1, width + 1, count)
    kv_lens[0] = rng.choice([1, page_size, width])  # borders
    indices = paged_indices(kv_lens, page_size)
    with RecordingDevice().no_sync():
        indptr = torch.from_numpy(indices.kv_indptr)
        found = kv_indices(tokens, torch.from_numpy(rows), indptr, indices.num_pages, page_size)
    for b, (row, length) in enumerate(zip(rows, kv_lens, strict=True)):
        begin, end = indices.kv_indptr[b], indices.kv_indptr[b + 1]
        assert found[begin:end].tolist() == table[row, : -(-length // page_size)].tolist()
        assert (end - begin - 1) * page_size + indices.last_page_len[b] == length
    assert (indices.kv_indptr[0], indices.kv_indptr[-1]) == (0, len(found))
    assert indices.kv_indptr.dtype == indices.last_page_len.dtype == np.int32
