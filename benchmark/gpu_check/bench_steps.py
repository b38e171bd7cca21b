"""Steps of a model with random weights, as the scheduler would send them, and what they take."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from ...messages.base import pack_i32
from ...messages.worker import ForwardStep, SlotDelta
from ...model_runner.measure_steps import greedy_row
from ...model_runner.model_runner import ModelRunner
from ...model_runner.step_queue import StepQueue
from ...model_runner.step_runner import StepRunner


class Times(NamedTuple):
    """Of a step, in milliseconds: from one result to the next, and of the host's launch. ``idle``: share of the time in
    which the GPU had nothing to do, NaN where there is none.
    """

    step_ms: float
    launch_ms: float
    idle: float


class BenchSteps:
    """Rows of ``context`` tokens each, their pages side by side."""

    def __init__(self, model: ModelRunner, rows: int, context: int) -> None:
        self.model = model
        self._steps = StepRunner(model, rows)
        self._context = context
        size = model.page_size
        self._row_slots = (context // size + 8) * size
        self._decode(1, context, new=True)
        self._steps.capture_graphs()

    def decode(self, batch: int, count: int) -> Times:
        """``count`` decode steps of ``batch`` rows, each launched before the one before is read."""
        self._decode(batch, self._context, new=True)
        device, queue = self.model.hardware, StepQueue(self._steps, None, ahead=1 if self.model.hardware.beside else 0)
        launches, busy = [], 0.0
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

    def prefill(self, tokens: int, count: int) -> float:
        """Milliseconds of a prompt of ``tokens``, the best of ``count``."""
        best = float("inf")
        for _ in range(count):
            step = self._step(1, 0, [tokens], new=True)
            begin = time.perf_counter()
            self._steps.run(step)
            best = min(best, time.perf_counter() - begin)
        return best * 1e3

    def _busy(self, batch: int, count: int) -> float:
        """Seconds that the GPU works for so many steps, which are queued behind a long wait, so that it has no gaps.

        More are open than a server has (``step_arrays.py``): they may read one another's arrays, which are of one size.
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
        size, fit = self.model.page_size, self.model.max_total_tokens // self._row_slots
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
