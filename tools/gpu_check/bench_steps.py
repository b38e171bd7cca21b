"""Steps of a model with random weights, as the scheduler would send them, and what they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import ForwardStep, SlotDelta
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.steps.measure_steps import greedy_row
from pdserve.model_runner.steps.step_queue import StepQueue
from pdserve.model_runner.steps.step_runner import StepRunner


class Times(NamedTuple):
    """Milliseconds of a step: from one result to the next, and of the host's launch. ``idle``: share of the time in
    which the GPU had nothing to do, NaN if there is none.
    """

    step_ms: float
    launch_ms: float
    idle: float


class Captured(NamedTuple):
    """What the capture of graphs took. ``reserved``: bytes that torch holds afterwards, ``added`` of them since."""

    seconds: float
    reserved: int
    added: int


class BenchSteps:
    """Rows of ``context`` tokens each, their pages side by side."""

    def __init__(self, model: LoadedModel, rows: int, context: int) -> None:
        self.model = model
        self._steps = StepRunner(model, rows)
        self._context = context
        size = model.pools.page_size
        self._row_slots = (context // size + 8) * size
        self._decode(1, context, new=True)
        before, begin = _reserved(), time.perf_counter()
        self._steps.capture_graphs()
        model.device.synchronize()
        self.captured = Captured(time.perf_counter() - begin, _reserved(), _reserved() - before)

    def begin(self, batch: int) -> None:
        """Start ``batch`` rows anew by running their first step. Their context's KV was never computed."""
        self._decode(batch, self._context, new=True)

    def decode(self, batch: int, count: int) -> Times:
        """Run ``count`` decode steps of ``batch`` rows, each launched before the result of the previous one is read.

        Return the times of a step.
        """
        self.begin(batch)
        device, launches, busy = self.model.device, [], 0.0
        queue = self._queue()
        device.synchronize()
        begin = time.perf_counter()
        for i in range(count):
            before = time.perf_counter()
            queue.launch(self._step(batch, self._context + i % 32, [1] * batch))
            launches.append(time.perf_counter() - before)
            while queue.is_full:
                queue.collect()
        while len(queue):
            queue.collect()
        spent = time.perf_counter() - begin
        if device.torch.type == "cuda":
            busy = self._busy(batch, count)
        idle = 1 - busy / spent if busy else float("nan")
        return Times(spent / count * 1e3, float(np.median(launches)) * 1e3, max(0.0, idle) if busy else idle)

    def tokens(self, batch: int, positions: Sequence[int], *, overwrite: bool) -> list[list[int]]:
        """Run a decode step of ``batch`` rows at each of ``positions`` after the context. Return each step's tokens.

        ``begin`` must have been called. Two steps are open at a time. ``overwrite``: between launches, take freed
        memory of many sizes and fill it with numbers beyond every index. A graph that reads memory which nothing keeps
        then computes something else, or fails.
        """
        queue, found, held = self._queue(), [], []
        for position in positions:
            if overwrite:
                held = [_beyond_every_index(size, self.model.device.torch) for size in OVERWRITTEN * BLOCKS]
            queue.launch(self._step(batch, self._context + position, [1] * batch))
            while queue.is_full:
                found.append(unpack_i32(queue.collect().next_tokens).tolist())
        while len(queue):
            found.append(unpack_i32(queue.collect().next_tokens).tolist())
        del held
        return found

    def prefill(self, tokens: int, count: int) -> float:
        """Compute a prompt of ``tokens`` tokens ``count`` times, and return the median time in ms."""
        times = []
        for _ in range(count):
            step = self._step(1, 0, [tokens], new=True)
            begin = time.perf_counter()
            self._steps.run(step)
            times.append(time.perf_counter() - begin)
        return float(np.median(times)) * 1e3

    def _queue(self) -> StepQueue:
        return StepQueue(self._steps, NoPageMover(), ahead=1 if self.model.device.beside else 0)

    def _busy(self, batch: int, count: int) -> float:
        """Return the seconds that the GPU works for ``count`` steps, without gaps: they are queued behind a long wait.

        At most eight are run, and the time is scaled. More are open than a server has (``step_arrays.py``): they may
        read one another's arrays, which are of one size.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        few = min(count, 8)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        start.record()
        open_ = [self._steps.launch(self._step(batch, self._context + i, [1] * batch)) for i in range(few)]
        end.record()
        for launched in open_:
            self._steps.collect(launched)
        spent_ms: float = start.elapsed_time(end)
        return spent_ms / 1e3 * count / few

    def _decode(self, batch: int, start: int, *, new: bool) -> None:
        self._steps.run(self._step(batch, start, [1] * batch, new=new))

    def _step(self, batch: int, start: int, q_lens: list[int], *, new: bool = False) -> ForwardStep:
        rows = np.arange(batch)
        spans = [np.arange(start, start + q_len) for q_len in q_lens]
        size, fit = self.model.pools.page_size, self.model.pools.max_total_tokens // self._row_slots
        firsts = [(row % fit) * self._row_slots + size for row in range(batch)]
        deltas = [np.arange(first, first + start) for first in firsts] if new and start else []
        return ForwardStep(
            step_id=1,
            rows=pack_i32(rows),
            starts=pack_i32(np.full(batch, start)),
            q_lens=pack_i32(q_lens),
            use_last=pack_i32([0] * batch),
            sample=pack_i32([1] * batch),
            input_ids=pack_i32(np.ones(sum(q_lens), dtype=np.int64)),
            out_cache_loc=pack_i32(np.concatenate([first + span for first, span in zip(firsts, spans, strict=True)])),
            new_rows=[greedy_row(row) for row in range(batch)] if new else [],
            slot_deltas=[SlotDelta(row, 0, pack_i32(slots)) for row, slots in enumerate(deltas)],
        )


OVERWRITTEN = (1, 2, 8, 64, 256, 1 << 16, 1 << 20)
"""Sizes in numbers of 8 bytes: those of the step's arrays, of logits and of activations."""
BLOCKS = 8
"""Blocks of each of these sizes that are taken at once."""


def _beyond_every_index(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), 2**40, dtype=torch.int64, device=device)


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
