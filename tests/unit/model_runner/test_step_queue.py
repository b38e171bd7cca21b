"""Steps between launch and result: how many are open, in which order they end, and what is pushed of them."""

from __future__ import annotations

import pytest
from support.handovers import named

from pdserve.messages.worker import SendPages, StepResult
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.steps.step_queue import StepQueue
from tests.unit.model_runner.test_step_runner import make_step


class Steps:
    """What the queue asks for, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def launch(self, step, done):
        self.log.append(("launch", step.step_id))
        self.done = done
        return step

    def collect(self, launched) -> StepResult:
        self.log.append(("collect", launched.step_id))
        return StepResult(launched.step_id, b"", 1.0)


class Engine:
    """What is pushed, and how much of it was there."""

    def __init__(self) -> None:
        self.pushed, self.submitted, self.woken = [], [], 0

    def submit(self, command) -> None:
        self.submitted.append(command)

    def push(self, push, done) -> None:
        self.pushed.append((push, done))

    def wake(self) -> None:
        self.woken += 1


def step(number: int, **extra):
    return make_step((0, number, [1], True), step_id=number, **extra)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_so_many_are_open_and_they_end_in_order(ahead: int) -> None:
    steps = Steps()
    queue = StepQueue(steps, NoPageMover(), ahead)
    ended = []
    for number in range(8):
        queue.launch(step(number))
        if queue.is_full:
            ended.append(queue.collect().step_id)
        assert len(queue) == min(number + 1, ahead)
    assert steps.log[: ahead + 2] == [("launch", i) for i in range(ahead + 1)] + [("collect", 0)]
    while len(queue):
        ended.append(queue.collect().step_id)
    assert ended == list(range(8))


def test_what_is_pushed_is_all_there_with_the_result() -> None:
    steps, engine = Steps(), Engine()
    queue = StepQueue(steps, engine, ahead=1)
    queue.launch(step(0, pushes=["pages"]))
    queue.launch(step(1))
    [(pushed, done)] = engine.pushed
    assert (pushed, done.count, engine.woken) == ("pages", 0, 0)
    queue.collect()
    assert done.count > 1000
    assert engine.woken == 1
    queue.collect()
    assert engine.woken == 1


def test_who_hands_nothing_over_pushes_nothing() -> None:
    with pytest.raises(RuntimeError, match="without hand-overs"):
        StepQueue(Steps(), NoPageMover(), ahead=0).launch(step(0, pushes=["pages"]))


def test_pages_of_steps_that_the_device_may_not_have_computed_wait_for_these() -> None:
    engine = Engine()
    queue = StepQueue(Steps(), engine, 1)
    pages = SendPages(named(1), [b""], [b""], False)
    queue.send(pages)
    assert engine.submitted == [pages]  # nothing is under way: they are there
    queue.launch(step(0))
    queue.launch(step(1, pushes=[pages]))
    queue.send(pages)
    ends = [done for _, done in engine.pushed]
    queue.collect()
    assert [done.count for done in ends] == [0, 0]
    assert engine.woken == 0
    queue.collect()
    assert all(done.count for done in ends)
    assert engine.woken == 1
    queue.send(pages)
    assert engine.submitted == [pages, pages]
