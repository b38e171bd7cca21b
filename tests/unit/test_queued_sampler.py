"""The sampler that never waits chooses what the other one does, whatever the rows ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.recording_device import RecordingDevice

from pdserve.messages.base import pack_i32
from pdserve.model_runner.queued_sampler import QueuedSampler
from pdserve.model_runner.rows import RowStates
from pdserve.model_runner.sampler import sample
from pdserve.model_runner.seen_tokens import SeenTokens
from tests.unit.test_step_runner import make_row

ROWS, VOCAB = 24, 700


def draw_row(row: int, rng: np.random.Generator):
    changes = {"seed": int(rng.integers(2**63)), "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0]))}
    changes["top_k"] = int(rng.choice([-1, 1, 5, 64, 65, 300, VOCAB]))
    changes["top_p"] = float(rng.choice([1.0, 0.95, 0.5, 1e-6]))
    changes["min_p"] = float(rng.choice([0.0, 0.02, 0.9]))
    prompt = rng.integers(0, VOCAB, 12)
    if rng.random() < 0.5:
        changes |= {"frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.3}
        changes |= {"history": pack_i32(prompt), "prompt_len": int(rng.integers(0, 13))}
    if rng.random() < 0.3:
        changes |= {"logit_bias": {int(prompt[0]): 3.5, 10**6: 1.0}, "history": pack_i32(prompt)}
    if rng.random() < 0.3:
        changes |= {"min_new_tokens": 100, "stop_ids": (int(prompt[1]), 10**6)}
    return make_row(row, **changes), prompt


@pytest.mark.parametrize("seed", range(8))
def test_the_same_tokens_are_chosen_step_after_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device = RecordingDevice()
    states, seen, queued = RowStates(ROWS, VOCAB, device.torch), SeenTokens(device, VOCAB), QueuedSampler(device)
    for row in range(ROWS):
        init, prompt = draw_row(row, rng)
        states.start(init)
        if init.history is not None:
            seen.start(row, prompt.astype(np.int32), init.prompt_len)
    for position in range(12, 20):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        # Coarse, so that there are equals.
        logits = torch.from_numpy(rng.normal(0, 2, (len(rows), VOCAB)).astype(np.float32)).bfloat16().float()
        if seed % 2:
            logits[0, 5] = float(rng.choice([np.nan, -np.nan, np.inf, -np.inf]))
        params, positions = states.params(rows), np.full(len(rows), position)
        edits = states.edits(rows, params, positions)
        expected = sample(logits, params, positions, edits)
        before = logits.clone()
        with device.no_sync():
            chosen = queued.sample(logits, params, positions, edits, seen.of(rows))
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        assert chosen.finite.tolist() == expected.finite.tolist()
        ok = expected.finite
        assert chosen.tokens[ok].tolist() == expected.tokens[ok].tolist()
        for i, history in states.histories(rows, params):
            history.append(int(chosen.tokens[i]))


def test_counts_are_the_next_request_s_when_a_row_is_taken_again() -> None:
    seen = SeenTokens(RecordingDevice(), 10)
    for row in range(9):
        seen.start(row, np.array([row, 3], dtype=np.int32), 1)
    assert seen.counts[seen.of(np.array([7]))._places_M[0]].tolist() == [-1] * 3 + [1] + [-1] * 3 + [0, -1, -1]
    seen.stop(7)
    assert seen.of(np.array([7])) is None
    seen.start(7, np.array([1, 1, 1], dtype=np.int32), 1)
    place = seen.of(np.array([2, 7]))._places_M[1]
    assert seen.counts[place].tolist() == [-1, 2] + [-1] * 8
    seen.of(np.array([7, 2])).count(torch.tensor([4, 1]))
    assert seen.counts[place].tolist() == [-1, 2, -1, -1, 1] + [-1] * 5
