"""Rows of the sampler's table on a device, begun as the step runner begins them on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import RowInit
from pdserve.model_runner.sampling.choose_tokens import choose_tokens
from pdserve.model_runner.sampling.logit_edits.bias import TokenBias
from pdserve.model_runner.sampling.rows import RowStates, host_rows
from pdserve.model_runner.sampling.rules import TorchRules
from pdserve.model_runner.sampling.sampled import Sampled
from pdserve.model_runner.sampling.triton.row_table import (
    NO_EDITS,
    RowTable,
    join_edits,
    list_edits,
    make_table,
    pack_words,
    start_rows,
    write_edits,
)
from pdserve.model_runner.sampling.triton.sampling import make_work, sample

from .sampler_reference import make_row
from .triton_device import DEVICE, there


class Batch(NamedTuple):
    """Requests that sample, row ``i`` of the table the ``i``-th."""

    logits: torch.Tensor
    inits: list[RowInit]
    positions: np.ndarray


def begin_rows(inits: Sequence[RowInit], vocab: int) -> tuple[RowTable, RowStates]:
    """Begin the same rows on the device and on the host. The device's memory has remains of other requests."""
    states = host_rows(len(inits), vocab)
    for init in inits:
        states.start(init)
    rows = np.arange(len(inits))
    table = make_table(len(inits), vocab, len(inits), DEVICE)
    table.counts.fill_(7)
    table.biases.fill_(3.0)
    edited = np.array([bool(init.history or init.sampling.logit_bias or init.stop_ids) for init in inits])
    # Places in another order than rows.
    places = np.where(edited, len(inits) - 1 - rows, NO_EDITS)
    start_rows(table, there(rows), there(pack_words(states.params(rows), places)))
    lists = [
        list_edits(
            int(place),
            np.empty(0, np.int64) if init.history is None else unpack_i32(init.history).astype(np.int64),
            init.prompt_len,
            np.array([token for token in init.stop_ids if 0 <= token < vocab], dtype=np.int64),
            TokenBias.of(init.sampling.logit_bias, vocab),
        )
        for init, place in zip(inits, places, strict=True)
        if place != NO_EDITS
    ]
    if lists:
        write_edits(table, there(places[edited]), *(there(column) for column in join_edits(lists)))
    return table, states


def draw(batch: Batch, table: RowTable, *, chunk: int = 4096, listed: int = 4096) -> tuple[list[int], list[bool]]:
    """Sample a batch on the device. Returns the tokens, and whether each row was finite."""
    count, vocab = batch.logits.shape
    tokens = torch.full((count,), -5, device=DEVICE)
    finite = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    work = make_work(count, vocab, DEVICE, chunk=chunk, listed=listed)
    rows, positions = there(np.arange(count)), there(batch.positions)
    sample(there(batch.logits), table, rows, positions, tokens, finite, work)
    return tokens.tolist(), finite.tolist()


def host_draw(batch: Batch, states: RowStates) -> Sampled:
    """Draw tokens with the host's sampler."""
    rows = np.arange(len(batch.inits))
    params = states.params(rows)
    return choose_tokens(batch.logits.numpy(), states, rows, params, batch.positions, TorchRules())


def random_batch(seed: int, rows: int, vocab: int) -> Batch:
    """Draw a batch with all kinds of parameters, also at their limits.

    Logits are spread or flat, on a coarse grid (so with ties) or not.
    """
    rng = np.random.default_rng(seed)
    inits, logits, positions = [], [], []
    for row in range(rows):
        x = rng.standard_normal(vocab) * rng.choice([0.0, 0.3, 3.0, 12.0])
        logits.append(np.round(x * 4) / 4 if rng.random() < 0.5 else x)
        prompt, outputs, is_penalised = int(rng.integers(1, 8)), int(rng.integers(0, 8)), rng.random() < 0.5
        changes = {
            "temperature": rng.choice([0.0, 1e-5, 0.01, 0.7, 1.0, 3.0, 1e4]),
            "top_p": rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.99, 1e-30, 1 - 1e-16]),
            "min_p": rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
            "frequency_penalty": rng.choice([0.0, 0.5, -1.0]) if is_penalised else 0.0,
            "presence_penalty": rng.choice([0.0, 0.7]) if is_penalised else 0.0,
            "repetition_penalty": rng.choice([1.0, 1.3, 0.7]) if is_penalised else 1.0,
        }
        init = make_row(
            row,
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            prompt_len=prompt,
            top_k=int(rng.choice([-1, -1, 1, 2, 40, 64, 65, 900, 10**9])),
            history=pack_i32(rng.integers(0, vocab, prompt + outputs).tolist()) if is_penalised else None,
            min_new_tokens=int(rng.choice([0, 0, 5])),
            stop_ids=(0, 2, 10**6) if rng.random() < 0.4 else (),
            logit_bias={1: 2.5, 3: -100.0, 4: 1.25} if rng.random() < 0.3 else {},
            **{name: float(value) for name, value in changes.items()},
        )
        inits.append(init)
        positions.append(prompt + outputs)
    return Batch(torch.from_numpy(np.array(logits, dtype=np.float32)), inits, np.array(positions))
