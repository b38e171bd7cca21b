"""Rows that ask for everything there is, sampled step after step by a sampler that never waits, and by the host's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pdserve.messages.base import pack_i32
from pdserve.messages.worker import RowInit
from pdserve.model_runner.device.base import Device
from pdserve.model_runner.sampling.choose_tokens import choose_tokens
from pdserve.model_runner.sampling.device.base import DeviceSampler, SampledRows, device_rows
from pdserve.model_runner.sampling.rows import RowStates
from pdserve.model_runner.sampling.rules import TorchRules

from .sampler_reference import make_row

MakeSampler = Callable[[Device, RowStates], DeviceSampler]


def draw_row(row: int, rng: np.random.Generator, vocab: int, prompt_len: int) -> RowInit:
    changes = {"seed": int(rng.integers(2**63)), "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0]))}
    changes["top_k"] = int(rng.choice([-1, 1, 5, 64, 65, 300, vocab]))
    changes["top_p"] = float(rng.choice([1.0, 0.95, 0.5, 1e-6]))
    changes["min_p"] = float(rng.choice([0.0, 0.02, 0.9]))
    prompt = rng.integers(0, vocab, prompt_len)
    # Without a history they count for nothing.
    changes |= {"frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.3}
    if rng.random() < 0.5:
        changes |= {"history": pack_i32(prompt), "prompt_len": int(rng.integers(0, prompt_len + 1))}
    if rng.random() < 0.3:
        changes |= {"logit_bias": {int(prompt[0]): 3.5, 10**6: 1.0}}
    if rng.random() < 0.3:
        changes |= {"min_new_tokens": 100, "stop_ids": (int(prompt[1]), 10**6)}
    return make_row(row, **changes)


class Bench:
    """``rows`` requests of ``prompt_len`` tokens, at a sampler of ``device`` and at the host's."""

    def __init__(self, device: Device, make: MakeSampler, rows: int, vocab: int, seed: int, prompt_len: int = 12):
        self.rng = np.random.default_rng(seed)
        self.device = device
        self._rows, self._vocab, self._prompt_len = rows, vocab, prompt_len
        self._states = device_rows(rows, vocab, device.torch)
        self._sampler = make(device, self._states)
        self.position = prompt_len
        self.start(range(rows))

    def start(self, rows) -> None:
        """Give ``rows`` new requests."""
        inits = [draw_row(row, self.rng, self._vocab, self._prompt_len) for row in rows]
        for init in inits:
            self._states.start(init)
        with self.device.no_sync():
            self._sampler.start(inits)

    def step(self, bad: float | None = None) -> None:
        """Sample a token for some rows by both samplers, and compare them. ``bad``: a logit of the first row."""
        rows = self.rng.permutation(self._rows)[: self.rng.integers(1, self._rows + 1)]
        # Coarse, so that there are equals.
        logits = torch.from_numpy(self.rng.normal(0, 2, (len(rows), self._vocab)).astype(np.float32)).bfloat16().float()
        if bad is not None:
            logits[0, 5] = bad
        params, positions = self._states.params(rows), np.full(len(rows), self.position)
        expected = choose_tokens(logits.numpy(), self._states, rows, params, positions, TorchRules())
        put = self.device.upload
        there, sampled = put(logits.numpy()), SampledRows(rows, positions, params, put(rows), put(positions))
        with self.device.no_sync():
            chosen = self._sampler.sample(there, sampled)
        tokens, finite, last, after = self.device.fetch([*chosen, self._states.last_tokens, there]).wait()
        assert np.array_equal(after, logits.numpy(), equal_nan=True)
        assert finite.tolist() == expected.finite.tolist()
        assert tokens[finite].tolist() == expected.tokens[finite].tolist()
        assert last[rows].tolist() == tokens.tolist()
        for i, history in self._states.histories(rows, params):
            history.append(int(tokens[i]))
        self.position += 1
