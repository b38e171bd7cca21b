"""The worker's loop (``model_runner/process.py``) in simulated time: what share of it a GPU has nothing to do.

``serve_frame`` and ``StepQueue`` are the real ones. The GPU computes one step after another, equally long. Launches,
looks into the channel and sending of results take the worker's time. The scheduler sends a step some time after each
result, and has two on their way at most, as in ``Scheduler.max_in_flight``. All times are in ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from pdserve.messages.worker import ForwardStep, StepResult
from pdserve.model_runner.device.compile_watch import CompileWatch
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.process import serve_frame
from pdserve.model_runner.steps.step_queue import StepQueue
from tests.unit.model_runner.test_step_runner import make_step

IN_FLIGHT = 2


@dataclass(frozen=True)
class Times:
    """``step``: on the GPU. ``launch``, ``tell``, ``look``: of the worker. ``answer``: of the scheduler, from a result
    to the arrival of the next step.
    """

    step: float
    launch: float
    answer: float
    tell: float = 0.05
    look: float = 0.005


class _Launched(NamedTuple):
    step: ForwardStep
    end: float


class SimulatedWorker:
    """Receiver, sender, steps and clock at once."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._now = self._scheduler_free = self._gpu_free = 0.0
        self._arrivals = [0.0] * IN_FLIGHT
        self._sent = 0
        self.starts: list[float] = []
        self.sent_ids: list[int] = []
        prefault = SimpleNamespace(used=lambda slot: None)
        idle = SimpleNamespace(wait_ms=-1, used=lambda: None)
        steps = StepQueue(self, NoPageMover(), ahead=1)
        self._worker = SimpleNamespace(steps=steps, prefault=prefault, idle=idle, compiles=CompileWatch())

    def idle_share(self, steps: int = 500) -> float:
        """Return the idle share of the time of ``steps`` steps, after the first ones."""
        while len(self.starts) < steps + 20:
            serve_frame(self, self, self._worker)
        begin, end = self.starts[20], self.starts[-1]
        return 1 - self._times.step * (len(self.starts) - 21) / (end - begin)

    # What the loop asks of its receiver and its sender.

    def recv(self, timeout_ms: int) -> list[ForwardStep]:
        self._now += self._times.look
        if timeout_ms < 0:
            self._now = max(self._now, self._arrivals[0])
        if not self._arrivals or self._arrivals[0] > self._now:
            return []
        self._arrivals.pop(0)
        self._sent += 1
        return [make_step((0, self._sent, [1], True), step_id=self._sent)]

    def send(self, result: StepResult) -> None:
        self._now += self._times.tell
        self.sent_ids.append(result.step_id)
        self._scheduler_free = max(self._scheduler_free, self._now) + self._times.answer
        self._arrivals.append(self._scheduler_free)

    # What the queue asks of the step runner.

    def launch(self, step: ForwardStep, done: object) -> _Launched:
        self._now += self._times.launch
        begin = max(self._now, self._gpu_free)
        self.starts.append(begin)
        self._gpu_free = begin + self._times.step
        return _Launched(step, self._gpu_free)

    def is_done(self, launched: _Launched) -> bool:
        return launched.end <= self._now

    def collect(self, launched: _Launched) -> StepResult:
        self._now = max(self._now, launched.end)
        return StepResult(launched.step.step_id, b"", 1.0)
