"""One instance in virtual time: the real scheduler, planner and prefix tree, over a simulated model.

A formula gives the time of the model's steps, and its outputs have given lengths.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...messages.base import Message, pack_i32, unpack_i32
from ...messages.outputs import ReqError, TokenBatch
from ...messages.requests import GenerateReq
from ...messages.sampling import SamplingParams
from ...messages.worker import ForwardStep, KVGroup, KVLayout, MeasuredStep, RowInit, StepResult, WorkerReady
from ...scheduler.estimates.cost_model import StepShape
from ...scheduler.options import SchedulerOptions
from ...scheduler.outbox import Outbox
from ...scheduler.scheduler import Scheduler
from ..errors import BenchError
from ..prompts import TokenIds

GOES_ON, STOP = 2, 1
"""The model's words."""
NEVER = 1 << 30
READ_MS, TOKEN_MS, DECODE_MS, KV_MS, PAIR_MS = 5.15, 0.25, 0.15, 0.9e-3, 1.2e-4
MEASURED = (StepShape(1, 64), StepShape(8, 512), *(StepShape().with_piece(0, n) for n in (16, 48, 64, 128)))


def step_ms(shape: StepShape) -> float:
    """Return an estimate in ms of a step of SmolLM2-135M in bfloat16 on two cores of an AMD EPYC.

    It follows the tables of docs/performance.md. A small step reads the weights; a large one is bound by arithmetic.
    """
    linear = max(READ_MS, TOKEN_MS * shape.tokens) + DECODE_MS * shape.decodes
    return linear + KV_MS * shape.kv_tokens + PAIR_MS * shape.prompt_pairs


class Job(NamedTuple):
    """A request: ``at`` seconds it comes, and the model ends it after ``output_len`` tokens."""

    rid: str
    at: float
    prompt: TokenIds
    output_len: int
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """Seconds of the virtual clock, 0 for what has not happened; tokens."""

    job: Job
    first_token: float = 0.0
    end: float = 0.0
    cached_tokens: int = 0


class _Sink:
    def __init__(self) -> None:
        self.messages: deque[Message] = deque()

    def send(self, *messages: Message) -> None:
        self.messages.extend(messages)


class VirtualInstance:
    """``run`` serves jobs; what came of them is in ``outcomes``, and counts are the scheduler's own."""

    def __init__(self, options: SchedulerOptions, context_length: int) -> None:
        layout = KVLayout(options.page_size, (KVGroup((0,), "mha", 1, 1, "int64", options.page_size * 8),))
        ready = WorkerReady(
            fingerprint="virtual",
            vocab_size=1 << 16,
            context_length=context_length,
            max_total_tokens=options.max_total_tokens or 0,
            layout=layout,
            device="cpu",
            attention_backend="virtual",
            weights_dtype="bfloat16",
            backend_metadata=b"",
            load_seconds={},
            measured=[MeasuredStep(*shape, forward_ms=step_ms(shape)) for shape in MEASURED],
        )
        self._worker, self._answers = _Sink(), _Sink()
        self._outbox = Outbox(self._worker, self._answers)
        self.scheduler = Scheduler(options, ready, self._outbox)
        self._rows: dict[int, RowInit] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.now = 1.0

    def run(self, jobs: list[Job]) -> None:
        """Serve ``jobs``, which are in order of arrival, in virtual time until all have ended. Fills ``outcomes``.

        Raises ``BenchError`` if a job is refused or cannot go on.
        """
        start = self.now
        todo = deque(jobs)
        while todo or not self.scheduler.is_idle:
            while todo and start + todo[0].at <= self.now:
                self._submit(todo.popleft(), start)
            self.scheduler.run_steps(self.now)
            self._send()
            if self._worker.messages:
                self._work()
            elif todo:
                self.now = max(self.now, start + todo[0].at)
            elif self.scheduler.reqs:
                raise BenchError(f"{len(self.scheduler.reqs)} requests can't go on")

    def _submit(self, job: Job, start: float) -> None:
        self.outcomes[job.rid] = Outcome(job)
        req = GenerateReq(
            rid=job.rid,
            input_ids=pack_i32(job.prompt),
            sampling=SamplingParams(seed=0, max_new_tokens=job.max_tokens, temperature=0.0),
            stop_ids=(STOP,),
            arrival=start + job.at,
            stream=True,
        )
        self.scheduler.arrivals.admit(req, req.arrival)

    def _work(self) -> None:
        """Simulate the oldest step that was sent: advance the virtual clock and give the scheduler its result."""
        step = self._worker.messages.popleft()
        assert isinstance(step, ForwardStep)
        for row in step.new_rows:
            self._rows[row.row] = row
        shape, tokens = StepShape(), []
        arrays = (step.rows, step.starts, step.q_lens, step.sample)
        for row_no, start, length, samples in zip(*(unpack_i32(a).tolist() for a in arrays), strict=True):
            if length == 1 and samples:
                shape = shape._replace(decodes=shape.decodes + 1, kv_tokens=shape.kv_tokens + start)
            else:
                shape = shape.with_piece(start, length)
            if samples:
                row = self._rows[row_no]
                generated = start + length - row.prompt_len + 1
                tokens.append(STOP if generated >= self.outcomes[row.rid].job.output_len else GOES_ON)
        ms = step_ms(shape)
        self.now += ms / 1000
        self.scheduler.on_step_result(StepResult(step.step_id, pack_i32(tokens), ms), self.now)
        self._send()
        self.scheduler.catch_up()

    def _send(self) -> None:
        self._outbox.flush()
        while self._answers.messages:
            message = self._answers.messages.popleft()
            if isinstance(message, ReqError):
                raise BenchError(f"a request was refused: {message.message}")
            if not isinstance(message, TokenBatch):
                continue
            for item in message.items:
                outcome = self.outcomes[item.rid]
                outcome.first_token = outcome.first_token or self.now
                if item.finish is not None and item.meta is not None:
                    outcome.end, outcome.cached_tokens = self.now, item.meta.cached_tokens


def ttft_ms(outcomes: list[Outcome], start: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return [N] in ms: the time from each request's arrival to its first token.

    ``start``: virtual time in seconds from which arrivals count.
    """
    return np.array([(o.first_token - start - o.job.at) * 1000 for o in outcomes])
