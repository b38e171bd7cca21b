"""The scheduler's loop by itself: what leaves first in a turn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
import zmq
from support.sim import make_generate, make_options, make_worker_ready

from pdserve.messages.channel import Receiver, Sender
from pdserve.messages.control import Ping, Pong, RoleReq
from pdserve.messages.error_codes import STARTING
from pdserve.messages.outputs import ReqError
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.routes import ToDetokenizer, ToScheduler, ToSchedulerFromWorker, ToSupervisor
from pdserve.messages.worker import WorkerReady
from pdserve.runtime import gc_control
from pdserve.runtime.child import ChildContext
from pdserve.scheduler.arrivals import Arrivals
from pdserve.scheduler.instance import LoadedInstance
from pdserve.scheduler.loading import LoadingInstance
from pdserve.scheduler.process import MESSAGES_A_TICK, SchedulerProcess
from pdserve.scheduler.scheduler import Scheduler


@pytest.fixture(autouse=True)
def _usual_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


class Loop:
    """A scheduler's process in this one, and the ends of its channels."""

    def __init__(self, folder: Path) -> None:
        self._zmq_ctx: zmq.Context[Any] = zmq.Context()
        self._ctx = ChildContext("scheduler", folder, "e1", make_options(), "s", self._zmq_ctx)
        self.process = SchedulerProcess(self._ctx)
        # A process that reports to be ready waits until the report has left.
        self.supervisor: Receiver[Any] = Receiver(self._zmq_ctx, self._ctx.address("supervisor"), ToSupervisor)
        self.answers: Receiver[Any] = Receiver(self._zmq_ctx, self._ctx.address("detokenizer"), ToDetokenizer)

        self.events = Sender(self._zmq_ctx, self._ctx.address("worker_events"))
        self.inbox = Sender(self._zmq_ctx, self._ctx.address("scheduler"))

    def close(self) -> None:
        # That the process is ready is sent by a socket that lingers: it keeps the context until the report is read.
        assert isinstance(self.process.instance, LoadingInstance) or self.supervisor.recv(60_000)
        self._zmq_ctx.destroy(linger=0)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with closing(Loop(tmp_path)) as loop:
        yield loop


def instance_of(loop: Loop) -> LoadedInstance:
    """Return the instance, which has loaded its model by now."""
    assert isinstance(loop.process.instance, LoadedInstance)
    return loop.process.instance


def test_answers_leave_before_the_invariants_are_checked(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    left: list[object] = []

    def check(scheduler: Scheduler) -> None:
        while frame := loop.answers.recv(10_000):
            left.extend(frame)
            if any(isinstance(message, Pong) for message in frame):
                break

    monkeypatch.setattr(Scheduler, "check_invariants", check)
    idle_check = instance_of(loop)._idle_check
    idle_check._checked_at, idle_check._checked_step = 0.0, -1
    loop.inbox.send(Ping(id=7))
    loop.process.tick()
    assert [message for message in left if isinstance(message, Pong)]


def test_a_flood_of_requests_is_taken_in_over_several_turns(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn, streams get their tokens and peers their heartbeats, whatever a frame holds."""
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    names: list[str] = []
    monkeypatch.setattr(Arrivals, "admit", lambda arrivals, msg, now: names.append(msg.rid))
    flood = [f"r{i}" for i in range(2 * MESSAGES_A_TICK + 10)]
    loop.inbox.send(*(make_generate(name, [1, 2, 3]) for name in flood))
    sizes = []
    while len(names) < len(flood):
        before = len(names)
        loop.process.tick()
        sizes.append(len(names) - before)
    assert sizes == [MESSAGES_A_TICK, MESSAGES_A_TICK, 10]
    assert names == flood


def test_no_collection_looks_at_the_whole_tree_while_requests_run(loop: Loop) -> None:
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    gc.collect()  # Nothing is left that lives long, so that only the thresholds decide. Python spares a large heap.
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if (phase, info["generation"]) == ("start", 2):
            full.append(1)

    gc.callbacks.append(note)
    try:
        assert gc.isenabled(), "an earlier test left the collector off"
        kept: list[list[list[None]]] = []
        # The usual thresholds make a full collection after 10 middle ones. Other garbage may delay these.
        while gc.get_count()[2] <= 20 and not full:
            kept.append([[]])
    finally:
        gc.callbacks.remove(note)
    assert not full


def test_an_idle_loop_collects_what_busy_ones_left(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    seen = []
    for count, is_idle in ((gc_control.IDLE - 1, True), (gc_control.IDLE, False), (gc_control.IDLE, True)):
        monkeypatch.setattr(gc, "get_count", lambda count=count: (0, 0, count))
        monkeypatch.setattr(Scheduler, "is_idle", is_idle)
        check = instance_of(loop)._idle_check
        check._checked_at, check._checked_step = 0.0, -1
        loop.inbox.send(Ping(id=7))
        loop.process.tick()
        seen.append(len(collected))
    assert seen == [0, 0, 1]


def test_the_next_turn_comes_at_once_where_memory_came_free_after_hand_overs_were_looked_at(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    scheduler = instance_of(loop).scheduler
    timeouts = []

    monkeypatch.setattr(scheduler.handovers, "timeout_ms", lambda: 50)
    for has_freed in (False, True):
        scheduler.has_freed = has_freed
        timeouts.append(loop.process._timeout_ms())
    monkeypatch.undo()
    assert timeouts == [50, 0]


def test_every_message_is_handled_while_the_model_loads_and_afterwards(loop: Loop) -> None:
    loading = loop.process.instance
    assert set(get_args(ToScheduler)) | {WorkerReady} == loading.handlers.kinds
    loop.events.send(make_worker_ready(make_options()))
    loop.process.tick()
    # No second worker comes.
    declared = {*get_args(ToScheduler), *get_args(ToSchedulerFromWorker)} - {WorkerReady}
    assert instance_of(loop).handlers.kinds == declared


def test_while_the_model_loads_every_question_is_refused(loop: Loop) -> None:
    loop.inbox.send(Ping(id=3), make_generate("a", [1]), RoleReq("decode", id=4))
    loop.process.tick()
    said = loop.answers.recv(10_000)
    text = "the model is still loading"
    assert [m for m in said if isinstance(m, RefusedAnswer)] == [
        RefusedAnswer(503, text, id=3),
        RefusedAnswer(503, text, id=4),
    ]
    [error] = [m for m in said if isinstance(m, ReqError)]
    assert (error.rid, error.status, error.code) == ("a", 503, STARTING)
