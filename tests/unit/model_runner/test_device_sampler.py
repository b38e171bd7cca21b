"""The sampler that never waits chooses what the other one does, whatever the rows ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_samplers import Bench
from support.recording_device import RecordingDevice

from pdserve.model_runner.sampling.device import choose
from pdserve.model_runner.sampling.device.base import device_rows
from pdserve.model_runner.sampling.device.choose import choose_sampler
from pdserve.model_runner.sampling.device.torch_sampler import TorchSampler
from pdserve.model_runner.sampling.logit_edits.device_penalties import DevicePenalties


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_the_same_tokens_are_chosen_step_after_step(seed: int) -> None:
    bench = Bench(RecordingDevice(), TorchSampler, rows=24, vocab=700, seed=seed)
    for _ in range(8):
        bench.step(float(bench.rng.choice([np.nan, -np.nan, np.inf, -np.inf])) if seed % 2 else None)
    bench.start([3, 20])
    bench.step()


def test_a_gpu_gets_triton_s(monkeypatch) -> None:
    states, device = device_rows(2, 10, torch.device("cpu")), RecordingDevice()
    assert isinstance(choose_sampler(device, states, torch.float32), TorchSampler)
    triton_sampler = pytest.importorskip("pdserve.model_runner.sampling.device.triton_sampler")
    monkeypatch.setattr(triton_sampler, "TritonSampler", lambda *args: "triton")
    device.torch = torch.device("cuda")
    assert choose_sampler(device, states, torch.float32) == "triton"
    monkeypatch.setattr(choose, "TorchSampler", lambda *args: "torch")
    monkeypatch.setattr(states, "vocab_size", 2**19 + 1)
    assert choose_sampler(device, states, torch.float32) == "torch"
    monkeypatch.setattr(states, "vocab_size", 10)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    assert choose_sampler(device, states, torch.float32) == "torch"


def rows_of(penalties: DevicePenalties, *rows: int):
    return penalties.of(np.array(rows), np.empty(0), np.empty(0))


def test_counts_are_the_next_request_s_when_a_row_is_taken_again() -> None:
    seen = DevicePenalties(RecordingDevice(), 10)
    for row in range(9):
        seen.take(row, np.array([row, 3], dtype=np.int32), 1)
    assert seen.counts[rows_of(seen, 7)._places_M[0]].tolist() == [-1] * 3 + [1] + [-1] * 3 + [0, -1, -1]
    seen.stop(7)
    assert rows_of(seen, 7) is None
    seen.take(7, np.array([1, 1, 1], dtype=np.int32), 1)
    place = rows_of(seen, 2, 7)._places_M[1]
    assert seen.counts[place].tolist() == [-1, 2] + [-1] * 8
    rows_of(seen, 7, 2).count(torch.tensor([4, 1]))
    assert seen.counts[place].tolist() == [-1, 2, -1, -1, 1] + [-1] * 5
