"""The steps that the worker times before it is ready: which, how many, and for how long at most."""

from __future__ import annotations

import pytest

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import ForwardStep, StepResult
from pdserve.model_runner.steps.measure_steps import LIMIT_MS, SHAPES, measure_steps

PAGE = 16


class Clockwork:
    """Steps that take what they are told to, the first of each shape twice as long."""

    def __init__(self, ms_per_token: float) -> None:
        self.ms_per_token = ms_per_token
        self.steps: list[ForwardStep] = []
        self.spent = 0.0

    def run(self, step: ForwardStep) -> StepResult:
        tokens = int(unpack_i32(step.q_lens).sum())
        again = bool(self.steps) and self.steps[-1] == step
        ms = max(10.0, self.ms_per_token * tokens) * (1 if again else 2)
        self.steps.append(step)
        self.spent += ms
        return StepResult(0, pack_i32([]), ms)


def test_long_steps_run_once() -> None:
    clockwork = Clockwork(0.2)
    measured = measure_steps(clockwork, 256, 8192, PAGE)
    runs = [sum(unpack_i32(step.q_lens).sum() == tokens for step in clockwork.steps) for tokens in (1, 48, 128, 512)]
    # Two shapes have 128 tokens.
    assert runs == [2, 2, 2, 1]
    assert [m.forward_ms for m in measured[-2:]] == [51.2, 204.8]


def test_a_quick_machine_times_all_shapes_and_keeps_the_better_of_two() -> None:
    clockwork = Clockwork(0.1)
    measured = measure_steps(clockwork, 256, 8192, PAGE)
    assert len(measured) == len(SHAPES)
    assert [m.decodes for m in measured] == [1, 8, 0, 0, 0, 0, 0, 0]
    assert [m.prompt_tokens for m in measured] == [0, 0, 16, 48, 64, 128, 128, 512]
    assert (measured[1].kv_tokens, measured[1].forward_ms) == (512, 10.0)
    assert measured[-2].prompt_pairs == 128 * (384 + 64)
    for step in clockwork.steps:
        assert (unpack_i32(step.out_cache_loc) < PAGE).all(), "a step wrote KV where requests will look for theirs"
        assert len(step.new_rows) == len(unpack_i32(step.rows))


@pytest.mark.parametrize("ms_per_token", [2.0, 8.0, 60.0])
def test_a_slow_machine_stops_in_time(ms_per_token: float) -> None:
    clockwork = Clockwork(ms_per_token)
    measured = measure_steps(clockwork, 256, 8192, PAGE)
    assert 1 <= len(measured) < len(SHAPES)
    assert clockwork.spent <= 1.25 * LIMIT_MS


def test_short_contexts_and_few_rows_leave_shapes_out() -> None:
    measured = measure_steps(Clockwork(0.1), 4, 100, PAGE)
    assert [m.decodes + m.prompt_tokens for m in measured] == [1, 16, 48, 64]


def test_a_rehearsal_does_not_count() -> None:
    """On a GPU a shape's first step is slower by what libraries load for it."""
    clockwork = Clockwork(0.02)
    measured = measure_steps(clockwork, 256, 8192, PAGE, rehearse=True)
    assert len(clockwork.steps) >= 2 * len(SHAPES)
    assert [m.forward_ms for m in measured] == [m.forward_ms for m in measure_steps(Clockwork(0.02), 256, 8192, PAGE)]
    # Too slow for a second run that counts: what is measured is not the first.
    assert [m.forward_ms for m in measure_steps(Clockwork(30.0), 256, 8192, PAGE, rehearse=True)][:3] == [
        30.0,
        240.0,
        480.0,
    ]
