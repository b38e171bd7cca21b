"""Logit edits on the host: the bits of a device's, in place, and undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_samplers import draw_row
from support.sampler_reference import make_row

from pdserve.messages.base import pack_i32
from pdserve.model_runner.device.cpu import CpuDevice
from pdserve.model_runner.sampling.device.base import device_rows
from pdserve.model_runner.sampling.logit_edits.base import edited, find_edits
from pdserve.model_runner.sampling.logit_edits.device_penalties import DevicePenalties
from pdserve.model_runner.sampling.rows import host_rows

ROWS, VOCAB, PROMPT = 24, 700, 12


@pytest.mark.parametrize("seed", range(6))
def test_edits_have_the_bits_of_a_devices_and_leave_the_logits_as_they_were(seed: int) -> None:
    rng, device = np.random.default_rng(seed), CpuDevice()
    host, there = host_rows(ROWS, VOCAB), device_rows(ROWS, VOCAB, device.torch)
    penalties = DevicePenalties(device, VOCAB)
    for row in range(ROWS):
        init = draw_row(row, rng, VOCAB, PROMPT)
        host.start(init)
        there.start(init)
        penalties.start(init)
    rows, positions = rng.permutation(ROWS), np.full(ROWS, PROMPT)
    params = host.params(rows)
    logits = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    logits[0, :3] = np.nan, np.inf, -np.inf
    before, expected = logits.copy(), torch.from_numpy(logits.copy())
    for edit in find_edits((there.bias, penalties, there.early_stop), rows, params, positions):
        edit.apply(expected, params, device.upload)
    with edited(logits, params, host.edits(rows, params, positions)):
        assert (logits.view(np.uint32) != before.view(np.uint32)).any()
        np.testing.assert_array_equal(logits, expected.numpy())
    assert logits.tobytes() == before.tobytes()


def test_edits_are_undone_where_a_sampler_fails() -> None:
    states, rows = host_rows(1, 10), np.array([0])
    states.start(make_row(0, logit_bias={3: 1.0}))
    logits = np.zeros((1, 10), dtype=np.float32)

    def fail() -> None:
        with edited(logits, params, states.edits(rows, params, np.array([4]))):
            assert logits[0, 3] == 1.0
            raise MemoryError

    params = states.params(rows)
    with pytest.raises(MemoryError):
        fail()
    assert not logits.any()


def test_one_row_s_edits_touch_no_other_row() -> None:
    states, rows = host_rows(3, 50), np.array([2, 0, 1])
    for row in range(3):
        extra = {"repetition_penalty": 1.5, "history": pack_i32([5, 6])} if row == 1 else {}
        states.start(make_row(row, prompt_len=2, **extra))
    params, logits = states.params(rows), np.ones((3, 50), dtype=np.float32)
    [edit] = states.edits(rows, params, np.full(3, 2))
    assert [places.tolist() for places in edit.places()] == [[2, 2], [5, 6]]
    with edited(logits, params, [edit]):
        assert np.argwhere(logits != 1).tolist() == [[2, 5], [2, 6]]
