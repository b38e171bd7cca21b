"""Samplers of the device against the CPU's, and what they take: for ``kernels_part.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.messages.base import pack_i32
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import RowInit
from pdserve.model_runner.device.base import Device
from pdserve.model_runner.device.choice import open_device
from pdserve.model_runner.sampling.choose_tokens import choose_tokens
from pdserve.model_runner.sampling.device.base import DeviceSampler, SampledRows, device_rows
from pdserve.model_runner.sampling.device.torch_sampler import TorchSampler
from pdserve.model_runner.sampling.rows import RowStates
from pdserve.model_runner.sampling.rules import TorchRules

from .part import Part
from .record import Check, Finding

POSITION = 8
STEPS = 8


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each check of the device's samplers, and for each measurement of their time."""
    for name, make in (("triton", _triton), ("torch", TorchSampler)):
        yield f"{name}: sampler, everything asked for", lambda m=make: check_tokens(part, m)  # type: ignore[misc]
        yield f"{name}: log-probabilities", lambda m=make: check_scores(part, m)  # type: ignore[misc]
    for rows in (2,) if part.dry_run else (1, 64):
        for kind, change in KINDS.items():
            yield f"sampler, {rows} rows, {kind}", lambda r=rows, c=change: time_both(part, r, c)  # type: ignore[misc]


KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top-k": {"temperature": 0.7, "top_k": 40},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    # Some 5,000 tokens: more than the list of Triton's sampler takes.
    "top-p of flat logits": {"temperature": 1.0, "top_p": 0.9},
}


def _triton(device: Device, states: RowStates[Tensor]) -> DeviceSampler:
    from pdserve.model_runner.sampling.device.triton_sampler import TritonSampler

    return TritonSampler(device, states)


def check_tokens(part: Part, make: Callable[[Device, RowStates[Tensor]], DeviceSampler]) -> Finding:
    """Compare the device sampler's tokens with the CPU's, in steps of rows that use every sampling parameter.

    ``make``: makes the sampler. One token in a hundred may differ, where rounding decides.
    """
    rows, vocab, steps = (8, 500, 3) if part.dry_run else (64, 128_256, STEPS)
    rng = np.random.default_rng(0)
    device = open_device(str(part.device), strict=True)
    states, which, same = device_rows(rows, vocab, part.device), np.arange(rows), 0
    sampler = make(device, states)
    _start(states, sampler, [_row(row, rng, vocab) for row in range(rows)])
    for position in range(POSITION, POSITION + steps):
        logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
        sampled = _sampled(device, states, rows, position)
        there = device.upload(logits.numpy())
        with device.no_sync():
            chosen = sampler.sample(there, sampled)
        tokens = device.fetch([chosen.tokens]).wait()[0]
        expected = choose_tokens(logits.numpy(), states, which, sampled.params, sampled.positions, TorchRules()).tokens
        same += int((expected == tokens).sum())
        for i, history in states.histories(which, sampled.params):
            history.append(int(tokens[i]))
    total = rows * steps
    text = f"{same} of {total} tokens are those of the CPU"
    return Finding("", text, f"at least {total - total // 100}", same >= total - total // 100)


def check_scores(part: Part, make: Callable[[Device, RowStates[Tensor]], DeviceSampler]) -> Finding:
    """Compare log-probabilities of chosen tokens and of the best ones with those computed in float64 on the CPU."""
    rows, vocab, most = (3, 500, 5) if part.dry_run else (300, 128_256, 20)
    device = open_device(str(part.device), strict=True)
    sampler = make(device, device_rows(rows, vocab, part.device))
    rng = np.random.default_rng(1)
    logits, targets = rng.normal(0, 3, (rows, vocab)).astype(np.float32), rng.integers(0, vocab, rows)
    there = device.upload(logits), device.upload(targets)
    with device.no_sync():
        scored = sampler.score(*there, most)
    _, chosen, ids, best = device.fetch(scored).wait()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 1)
    right = torch.equal(torch.from_numpy(ids), expected.topk(most).indices)
    errors = (chosen - expected.numpy()[np.arange(rows), targets], best - expected.topk(most).values.numpy())
    error = max(float(np.abs(each).max()) for each in errors)
    text = f"off by {error:.1e} at most, {'the best tokens' if right else 'OTHER TOKENS'}"
    return Finding("", text, "at most 1e-04, the best tokens", right and error <= 1e-4)


def time_both(part: Part, rows: int, change: dict[str, float]) -> Finding:
    """Report the time from launch to token of the Triton sampler and of torch's, in µs.

    ``change``: sampling parameters that differ from the defaults.
    """
    vocab = 500 if part.dry_run else 128_256
    device = open_device(str(part.device))
    logits = device.upload(np.random.default_rng(2).normal(0, 3, (rows, vocab)).astype(np.float32))
    times = {name: _time(device, logits, make, change) for name, make in (("triton", _triton), ("torch", TorchSampler))}
    return Finding("", ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in times.items()))


def _time(
    device: Device, logits: Tensor, make: Callable[[Device, RowStates[Tensor]], DeviceSampler], change: dict[str, float]
) -> float:
    rows, vocab = logits.shape
    states = device_rows(rows, vocab, device.torch)
    sampler = make(device, states)
    _start(states, sampler, [_plain(row, **change) for row in range(rows)])
    sampled, best = _sampled(device, states, rows, POSITION), float("inf")
    for _ in range(STEPS):
        device.synchronize()
        begin = time.perf_counter()
        sampler.sample(logits, sampled)
        device.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def _start(states: RowStates[Tensor], sampler: DeviceSampler, inits: list[RowInit]) -> None:
    for init in inits:
        states.start(init)
    sampler.start(inits)


def _sampled(device: Device, states: RowStates[Tensor], rows: int, position: int) -> SampledRows:
    which, positions = np.arange(rows), np.full(rows, position)
    return SampledRows(which, positions, states.params(which), device.upload(which), device.upload(positions))


def _row(row: int, rng: np.random.Generator, vocab: int) -> RowInit:
    init = _plain(
        row,
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_p=float(rng.choice([1.0, 0.9])),
        top_k=int(rng.choice([-1, 20, 200])),
        min_p=float(rng.choice([0.0, 0.05])),
        frequency_penalty=0.5,
        presence_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={5: 4.0, 7: -100.0} if row % 4 == 0 else {},
        min_new_tokens=4 if row % 5 == 0 else 0,
    )
    init.history = pack_i32(rng.integers(0, vocab, POSITION)) if row % 3 == 0 else None
    init.stop_ids = (5, 9) if row % 5 == 0 else ()
    return init


def _plain(row: int, **sampling: Any) -> RowInit:
    return RowInit(row, prompt_len=6, sampling=SamplingParams(seed=row, **({"temperature": 0.0} | sampling)))
