"""The simulated instance on a virtual machine: steps take the time that a curve says, and the clock is theirs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.messages.base import unpack_i32
from pdserve.messages.worker import ForwardStep, MeasuredStep
from pdserve.scheduler.estimates.cost_model import StepShape
from support.sim import SimInstance, make_options

CONTEXT = 4096
TURN = 1e-4
"""Seconds that a turn of the scheduler takes."""

Curve = Callable[[StepShape], float]


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step: bound by memory up to a knee, by arithmetic behind it; a jump where kernels change."""

    read_ms: float
    token_ms: float
    kv_token_ms: float = 0.0
    pair_ms: float = 0.0
    decode_ms: float = 0.0
    jump_at: int = 1 << 30
    jump_ms: float = 0.0

    def __call__(self, shape: StepShape) -> float:
        """Return the milliseconds of a step, without noise."""
        linear = max(self.read_ms, self.token_ms * shape.tokens) + self.jump_ms * (shape.tokens > self.jump_at)
        attention = self.kv_token_ms * shape.kv_tokens + self.pair_ms * shape.prompt_pairs
        return linear + attention + self.decode_ms * shape.decodes


@dataclass(frozen=True)
class AddedUp(Machine):
    """A machine that reads the weights first and computes then."""

    def __call__(self, shape: StepShape) -> float:
        """Return the milliseconds of a step, without noise."""
        return self.read_ms + super().__call__(shape) - max(self.read_ms - self.token_ms * shape.tokens, 0.0)


@dataclass
class Noise:
    """Times a log-normal factor; and now and then, threefold, beside another process."""

    spread: float = 0.0
    outliers: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, ms: float) -> float:
        """Return the milliseconds that a step really takes."""
        return ms * self.rng.lognormvariate(0, self.spread) * (3 if self.rng.random() < self.outliers else 1)


def shape_of(step: ForwardStep) -> StepShape:
    """Counted from the message, not from what the scheduler thinks. A prompt's last piece of one token looks like a
    decode, the rest of its pieces sample nothing.
    """
    shape = StepShape()
    starts, lengths = unpack_i32(step.starts).tolist(), unpack_i32(step.q_lens).tolist()
    for start, length, samples in zip(starts, lengths, unpack_i32(step.sample).tolist(), strict=True):
        if length == 1 and samples:
            shape = shape._replace(decodes=shape.decodes + 1, kv_tokens=shape.kv_tokens + start)
        else:
            shape = shape.with_piece(start, length)
    return shape


def measured_by(curve: Curve) -> list[MeasuredStep]:
    """Return the steps that a worker of this machine measures before it is ready."""
    shapes = [StepShape(1, 64), StepShape(8, 512)] + [StepShape().with_piece(0, n) for n in (16, 48, 64, 128)]
    return [MeasuredStep(*shape, forward_ms=curve(shape)) for shape in shapes]


class TimedSim(SimInstance):
    """``gaps``: shape and milliseconds since the result before, of each step that the worker had when that one came."""

    def __init__(
        self, curve: Curve, noise: Noise | None = None, *, measured: bool = True, host_pages: int = 0, **options
    ) -> None:
        steps = measured_by(curve) if measured else []
        defaults = {
            "page_size": 16,
            "max_total_tokens": 32768,
            "max_running_requests": 32,
            "chunked_prefill_size": None,
        }
        super().__init__(make_options(**(defaults | options)), CONTEXT, steps, host_pages=host_pages)
        self.curve, self.noise = curve, noise or Noise()
        self.gaps: list[tuple[StepShape, float]] = []
        self.first_token_at: dict[str, float] = {}
        self._result_at = 0.0

    def plan(self) -> None:
        """Takes no time, or next to none."""
        self.now += TURN - 0.001
        super().plan()

    def work(self) -> bool:
        """Run one step to its end. Returns whether there was one."""
        if not self.to_worker.messages:
            return False
        step = self.to_worker.messages.popleft()
        shape = shape_of(step)
        ms = self.noise(self.curve(shape))
        self.now += ms / 1000
        self.gaps.append((shape, (self.now - max(self._result_at, self.now - ms / 1000)) * 1000))
        self._result_at = self.now
        result = self.worker.run(step)
        result.forward_ms = ms
        self.scheduler.on_step_result(result, self.now)
        self._flush()
        self._read()
        for rid in self.tokens:
            self.first_token_at.setdefault(rid, self.now)
        return True

    def run_until(self, stop: Callable[[], bool], turns: int = 20_000) -> None:
        """Turn until ``stop``."""
        for _ in range(turns):
            if stop():
                return
            self.plan()
            self.work()
        raise AssertionError(f"not there after {turns} turns")
