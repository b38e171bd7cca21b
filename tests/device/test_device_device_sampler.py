"""Triton's sampler in the loop that never waits: rows begin, sample and end as the step runner has them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_samplers import Bench
from support.recording_device import RecordingDevice
from support.sampler_reference import make_row
from support.triton_device import DEVICE, INTERPRETED

from pdserve.messages.base import pack_i32
from pdserve.model_runner.device.base import Device
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.sampling.device import triton_sampler
from pdserve.model_runner.sampling.device.base import SampledRows, device_rows
from pdserve.model_runner.sampling.device.logprobs import score
from pdserve.model_runner.sampling.device.triton_sampler import TritonSampler
from pdserve.model_runner.sampling.triton.token_logprobs import MAX_BEST
from pdserve.model_runner.steps import device_executor
from pdserve.model_runner.steps.step_queue import StepQueue
from pdserve.model_runner.steps.step_runner import StepRunner
from tests.unit.model_runner.test_decode_graphs import plain_steps, random_steps, recorded_model, same
from tests.unit.model_runner.test_kernels_engine import ROWS, save_model


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    """One that raises where the host waits for it."""
    if not INTERPRETED:
        yield open_device(str(DEVICE), strict=True)
        return
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def unguarded(self, *args, **kwargs):
        with torch._C.DisableTorchFunction():  # the interpreter computes on the host, where a GPU would not
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unguarded)
    with RecordingDevice() as device:
        yield device


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_same_tokens_are_chosen_step_after_step(device: Device, seed: int) -> None:
    bench = Bench(device, TritonSampler, rows=9, vocab=300, seed=seed)
    for _ in range(3):
        bench.step(float(bench.rng.choice([np.nan, -np.nan, np.inf, -np.inf])) if seed % 2 else None)
    bench.start([3, 7])
    bench.step()


def test_what_is_edited_is_a_row_s_own_whichever_rows_come_and_go(device: Device) -> None:
    states = device_rows(8, 4, device.torch)
    sampler = TritonSampler(device, states)
    logits = device.upload(np.array([[0.4, 1.0, 0.0, 0.3]], dtype=np.float32))

    def start(*inits) -> None:
        for init in inits:
            states.start(init)
        sampler.start(inits)

    def tokens(row: int, *positions: int) -> list[int]:
        rows, found = np.array([row]), []
        for position in positions:
            at = np.array([position])
            sampled = SampledRows(rows, at, states.params(rows), device.upload(rows), device.upload(at))
            found += device.fetch([sampler.sample(logits, sampled).tokens]).wait()[0].tolist()
        return found

    start(make_row(0, temperature=0.0, frequency_penalty=1.0, history=pack_i32([3, 3, 3, 3])))
    assert tokens(0, 4, 5) == [1, 0]
    # More places than there are at first: the counts of row 0 move.
    start(*(make_row(row, temperature=0.0, logit_bias={2: 9.0}) for row in range(1, 7)))
    assert tokens(0, 6, 7, 8) == [3, 1, 2]
    assert tokens(5, 4, 5) == [2, 2]
    # Banned from stopping at first. Penalised it would be by a history, which it has not.
    start(make_row(7, temperature=0.0, frequency_penalty=1.0, min_new_tokens=1, stop_ids=(1,)))
    assert tokens(7, 4, 5, 6) == [0, 1, 1]
    for _ in range(9):
        start(make_row(5, temperature=0.0, logit_bias={3: 9.0}))
    assert tokens(5, 4) == [3]
    assert tokens(6, 6) == [2]
    assert len(sampler._table.counts) == 8


def test_large_batches_go_in_several_launches(device: Device, monkeypatch) -> None:
    monkeypatch.setattr(triton_sampler, "BATCH", 2)
    bench = Bench(device, TritonSampler, rows=5, vocab=60, seed=3)
    for _ in range(3):
        bench.step()


@pytest.mark.parametrize("most", [0, 3, MAX_BEST + 1, 200])
def test_scores_are_torch_s(device: Device, monkeypatch, most: int) -> None:
    monkeypatch.setattr(triton_sampler, "BATCH", 2)
    sampler = TritonSampler(device, device_rows(3, 150, device.torch))
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(0))
    targets = np.array([7, 0, 149])
    there = device.upload(logits.numpy()), device.upload(targets)
    with device.no_sync():
        scored = sampler.score(*there, most)
    for found, expected in zip(
        device.fetch(scored).wait(), score(logits, torch.from_numpy(targets), most), strict=True
    ):
        assert found == pytest.approx(expected.numpy(), abs=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="the device that records is the host's")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_loop_answers_as_without(device: Device, monkeypatch, tmp_path: Path, seed: int) -> None:
    folder = save_model(tmp_path, "qwen3")
    plain = plain_steps(folder)
    monkeypatch.setattr(device_executor, "choose_sampler", TritonSampler)
    steps = StepRunner(recorded_model(folder, device, monkeypatch, cuda_graph_bs="1,3"), ROWS)
    steps.capture_graphs()
    queue, expected = StepQueue(steps, NoPageMover(), ahead=1), []
    for step in islice(random_steps(seed), 30 if seed else 8):
        queue.launch(step)
        expected.append(plain.run(step))
        if queue.is_full:
            same(queue.collect(), expected.pop(0))
    same(queue.collect(), expected.pop(0))
    assert len(steps.executor.sampler._table.counts) <= 2 * ROWS  # places go back with their requests


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="the device that records is the host's")
def test_logits_of_bfloat16_stay_so_and_give_the_same_answers(device: Device, monkeypatch, tmp_path: Path) -> None:
    """The kernels convert what they read: to the bit what a conversion before them gives."""
    folder = save_model(tmp_path, "qwen3")
    monkeypatch.setattr(device_executor, "choose_sampler", TritonSampler)
    answers = []
    for reads_halves in (True, False):
        monkeypatch.setattr(TritonSampler, "reads_halves", reads_halves)
        model = recorded_model(folder, device, monkeypatch, cuda_graph_bs="1,3", dtype="bfloat16")
        steps = StepRunner(model, ROWS)
        steps.capture_graphs()
        assert model.engine.logits_dtype is steps.executor.graphs._logits.dtype is torch.bfloat16
        answers.append([steps.run(step) for step in islice(random_steps(1), 8)])
    for ours, theirs in zip(*answers, strict=True):
        assert ours.next_tokens == theirs.next_tokens
        assert ours.logprobs == theirs.logprobs
        assert ours.input_logprobs == theirs.input_logprobs
