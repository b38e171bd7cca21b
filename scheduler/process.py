"""The scheduler process: its sockets and its loop. Imports no torch.

At start-up it binds the channels and answers questions with "loading" until the worker's ``WorkerReady``. Then it
builds the ``Scheduler``, and the hand-overs of an instance that takes part in them, and reports ready. From then on the
loop sleeps until a message, a worker's event, a peer's message or a deadline comes.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from ..messages.channel import Receiver, Sender, UndeclaredMessage
from ..messages.control import (
    MAX_TRANSFERS,
    Drain,
    Drained,
    FlushCacheReq,
    FlushCacheResult,
    Identity,
    Ping,
    Pong,
    RoleReq,
    RoleResult,
    ServerInfo,
    ServerInfoReq,
    Transfers,
    TransfersReq,
)
from ..messages.error_codes import STARTING
from ..messages.kv_debug import KVHashesReq, PagesHashed
from ..messages.memory import MemoryChanged, MemoryReq, PoolTrimmed, ResizeReq
from ..messages.moves import MigrateReq
from ..messages.outputs import ReqError
from ..messages.profiling import ProfileEvent, StartProfileReq, StopProfileReq
from ..messages.question import Question, Refused
from ..messages.requests import AbortReq, ForkedReq, GenerateReq, StopReq
from ..messages.routes import ToScheduler, ToSchedulerFromWorker
from ..messages.sessions import ResumeReq, SessionMessage
from ..messages.tiers import TierEvent
from ..messages.worker import StepResult, WorkerEvent, WorkerReady
from ..runtime import gc_control
from ..runtime.child import ChildContext, start_child
from ..runtime.malloc import return_freed_memory
from .handover import Handovers, NoHandovers
from .info import Verdict, server_info
from .kv_event_feed import KVEventFeed
from .kv_hashes import answer_hashes
from .memory_saver import MemorySaver
from .metrics_report import MetricsReport
from .outbox import Outbox
from .profiling import Profiling
from .refusals import BUSY
from .scheduler import Scheduler

log = logging.getLogger(__name__)

IDLE_CHECK_INTERVAL = 1.0
"""Seconds between invariant checks of an idle instance that has run steps since the last one."""

MAX_SLEEP_MS = 60_000
FRAMES_A_TURN = 1024
"""Maximum frames read from one channel before the other channels and the peers are served.

The poller wakes the loop for the rest.
"""
MESSAGES_A_TURN = 256
"""Maximum number of requests and questions handled per tick: admitting a request takes up to 50 µs."""


MakeHandovers = Callable[[Scheduler, zmq.Poller], Handovers]
"""Factory of the hand-overs. They register what they wait for with the loop's poller."""


def no_handovers(scheduler: Scheduler, poller: zmq.Poller) -> Handovers:
    """Return the hand-overs of an instance that exchanges no KV."""
    return NoHandovers()


class SchedulerProcess:
    """Owner of the sockets; see the module. Without ``make_handovers`` the instance exchanges no KV."""

    def __init__(self, ctx: ChildContext, make_handovers: MakeHandovers | None = None) -> None:
        self._ctx = ctx
        self._make_handovers = make_handovers or no_handovers
        self._inbox: Receiver[Any] = Receiver(ctx.zmq_ctx, ctx.address("scheduler"), ToScheduler)
        self._events: Receiver[Any] = Receiver(ctx.zmq_ctx, ctx.address("worker_events"), ToSchedulerFromWorker)
        self._outbox = Outbox(
            Sender(ctx.zmq_ctx, ctx.address("worker")),
            Sender(ctx.zmq_ctx, ctx.address("detokenizer")),
            Sender(ctx.zmq_ctx, ctx.address("transfer")) if make_handovers is not None else None,
        )
        self._unread: deque[Any] = deque()
        """Messages that were read and are handled in a later tick."""
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._events.socket, zmq.POLLIN)
        self._scheduler: Scheduler | None = None
        self._occupation: MemorySaver | None = None
        self._profiling: Profiling | None = None
        self._report: MetricsReport | None = None
        self._kv_feed: KVEventFeed | None = None
        self._checked_at = 0.0
        self._checked_step = -1
        self._verdict = Verdict()
        self._drained_sent = False

    def run(self) -> None:
        """Serve for ever. Raises errors that the process cannot survive."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for messages, answer them, and plan what can be computed."""
        self._poller.poll(self._timeout_ms())
        now = time.monotonic()
        if self._scheduler is not None:
            self._scheduler.now = now
        for event in self._drain(self._events):
            self._on_worker_event(event, now)
        for message in self._next_messages():
            self._on_message(message, now)
        if self._scheduler is not None:
            self._scheduler.handovers.poll(now)
        if self._occupation is not None:
            self._occupation.advance(now)
        if self._scheduler is not None:
            self._scheduler.run_steps(now)
            if self._profiling is not None:
                self._profiling.advance(now)
            self._tell_drained(self._scheduler)
        if self._report is not None:
            self._report.turn(now)
        if self._kv_feed is not None:
            self._kv_feed.turn()
        # Flush peers first: "drained" is sent with the outbox, and what peers wait for must be sent by then.
        if self._scheduler is not None:
            self._scheduler.handovers.flush()
        ended = self._outbox.flush()
        if self._scheduler is not None:
            for rid in ended:
                self._scheduler.stop(StopReq(rid))
            self._scheduler.catch_up()
            # After the last answer is sent: with a million cached tokens the check takes up to 66 ms.
            self._check_idle(self._scheduler, now)

    def _timeout_ms(self) -> int:
        ms = 0 if self._unread else self._wake_ms()
        if self._scheduler is None or self._unread:
            return ms
        if self._kv_feed is not None and self._kv_feed.is_replaying:
            return 0
        now = time.monotonic()
        waits = [self._scheduler.deadlines.seconds_left(now)]
        if self._occupation is not None:
            waits.append(self._occupation.seconds_left(now))
        if self._profiling is not None:
            waits.append(self._profiling.seconds_left(now))
        if (tiers := self._scheduler.tiers) is not None and (wait := tiers.timeout(now)) is not None:
            waits.append(wait)
        left = min(waits)
        return ms if math.isinf(left) else min(math.ceil(left * 1000), ms if ms >= 0 else MAX_SLEEP_MS)

    def _wake_ms(self) -> int:
        if self._scheduler is None:
            return -1
        if (limit := self._scheduler.handovers.timeout_ms()) is not None:
            return 0 if self._scheduler.has_freed else limit
        return int(IDLE_CHECK_INTERVAL * 1000) if self._scheduler.counters.steps != self._checked_step else -1

    def _next_messages(self) -> list[Any]:
        """Return the next messages to handle, in order, at most ``MESSAGES_A_TURN``.

        The rest waits for a later tick.
        """
        if len(self._unread) < MESSAGES_A_TURN:
            self._unread += self._drain(self._inbox)
        return [self._unread.popleft() for _ in range(min(len(self._unread), MESSAGES_A_TURN))]

    def _drain(self, receiver: Receiver[Any]) -> list[Any]:
        messages: list[Any] = []
        for _ in range(FRAMES_A_TURN):
            try:
                batch = receiver.recv(0)
            except UndeclaredMessage as e:
                log.error("%s", e)
                continue
            if not batch:
                break
            messages += batch
        return messages

    def _on_worker_event(self, event: WorkerEvent, now: float) -> None:
        if isinstance(event, WorkerReady):
            self._start(event, now)
            return
        assert self._scheduler is not None
        if isinstance(event, StepResult):
            self._scheduler.on_step_result(event, now)
        elif isinstance(event, MemoryChanged):
            assert self._occupation is not None
            self._occupation.on_changed(event)
        elif isinstance(event, PoolTrimmed):
            assert self._occupation is not None
            self._occupation.resize.on_trimmed(event)
        elif isinstance(event, PagesHashed):
            assert self._scheduler.memory.debug is not None
            self._scheduler.memory.debug.on_hashed(event, now)
        elif isinstance(event, ProfileEvent):
            assert self._profiling is not None
            self._profiling.on_event(event, now)
        elif isinstance(event, TierEvent):
            assert self._scheduler.tiers is not None
            self._scheduler.tiers.on_event(event, now)
        else:
            self._scheduler.handovers.on_transfer_event(event, now)

    def _start(self, worker: WorkerReady, now: float) -> None:
        self._scheduler = Scheduler(
            *(self._ctx.options, worker, self._outbox),
            lambda scheduler: self._make_handovers(scheduler, self._poller),
        )
        self._scheduler.handovers.membership.register()
        self._occupation = MemorySaver(self._scheduler)
        memory = self._scheduler.memory
        self._profiling = Profiling(self._outbox, lambda: memory.newest_step)
        self._report = MetricsReport(self._scheduler, self._outbox, self._occupation)
        if self._scheduler.kv_events is not None:
            self._kv_feed = KVEventFeed(self._ctx.zmq_ctx, self._ctx.options, self._scheduler.kv_events)
            if self._kv_feed.replay is not None:
                self._poller.register(self._kv_feed.replay, zmq.POLLIN)
        # A request leaves no reference cycles, and the tree may have as many nodes as the pool has pages.
        gc_control.defer_full_collections()
        self._ctx.report_ready(worker.load_seconds)

    def _on_message(self, message: Any, now: float) -> None:
        scheduler = self._scheduler
        if isinstance(message, ForkedReq):
            for request in message.requests():
                self._on_message(request, now)
        elif isinstance(message, Ping):
            self._outbox.reply(message, self._pong(now))
        elif scheduler is None:
            if isinstance(message, GenerateReq):
                text = "the model is still loading; try again in a few seconds"
                self._outbox.answer(ReqError(message.rid, 503, text, "overloaded_error", code=STARTING))
            elif isinstance(message, ResumeReq):
                text = "the model is still loading; try again in a few seconds"
                self._outbox.answer(ReqError(message.state.running.request.rid, 503, text, BUSY))
            elif isinstance(message, Question):
                self._outbox.reply(message, Refused(503, "the model is still loading"))
        elif isinstance(message, GenerateReq):
            scheduler.admit_message(message, now)
        elif isinstance(message, AbortReq):
            scheduler.abort(message)
        elif isinstance(message, StopReq):
            scheduler.stop(message)
        elif isinstance(message, SessionMessage):
            scheduler.sessions.on_message(message, now)
        elif isinstance(message, FlushCacheReq):
            self._outbox.reply(message, self._flush_cache(scheduler))
        elif isinstance(message, ServerInfoReq):
            self._outbox.reply(message, self._server_info(scheduler))
        elif isinstance(message, KVHashesReq):
            answer_hashes(message, scheduler.memory, scheduler.worker.layout, self._outbox)
        elif isinstance(message, TransfersReq):
            rooms = scheduler.handovers.transfers(now)
            rooms.sort(key=lambda room: -room["seconds"])
            self._outbox.reply(message, Transfers(len(rooms), rooms[:MAX_TRANSFERS]))
        elif isinstance(message, MigrateReq) and scheduler.handovers.membership.refusal() is None:
            scheduler.handovers.migrate(message, now)
        elif isinstance(message, MigrateReq):
            text = "this instance exchanges no KV; start it with --handover on"
            self._outbox.reply(message, Refused(409, text))
        elif isinstance(message, Drain):
            log.info("draining: %d requests are left", len(scheduler.reqs))
            scheduler.draining = True
            scheduler.handovers.membership.withdraw()
            scheduler.handovers.move_all(message.to)
        elif isinstance(message, RoleReq):
            self._outbox.reply(message, self._change_role(scheduler, message))
        elif isinstance(message, MemoryReq) and self._occupation is not None:
            self._occupation.ask(message, now)
        elif isinstance(message, ResizeReq) and self._occupation is not None:
            self._occupation.ask_resize(message, now)
        elif isinstance(message, StartProfileReq | StopProfileReq) and self._profiling is not None:
            self._profiling.ask(message, now)

    def _server_info(self, scheduler: Scheduler) -> ServerInfo:
        self._verdict = Verdict.of(scheduler, self._verdict)
        info = server_info(scheduler, self._ctx.epoch, self._verdict)
        if self._occupation is not None and self._report is not None:
            info["memory"] |= self._occupation.info()
            info["pressure"] = self._report.pressure.level(time.monotonic())
        if self._profiling is not None:
            info["profile"] = self._profiling.info()
        return ServerInfo(info)

    def _change_role(self, scheduler: Scheduler, message: RoleReq) -> RoleResult | Refused:
        before = scheduler.role
        if scheduler.handovers.membership.refusal() is not None:
            text = "this instance exchanges no KV, so it can only be unified; start it with --handover on"
            return Refused(409, text)
        scheduler.planner.budget.role = message.role
        scheduler.handovers.membership.register()
        log.info("role changed from %s to %s", before, message.role)
        return RoleResult(message.role, before)

    def _flush_cache(self, scheduler: Scheduler) -> FlushCacheResult | Refused:
        if scheduler.reqs:
            text = f"{len(scheduler.reqs)} requests are running; flush when the instance is idle"
            return Refused(400, text)
        return FlushCacheResult(scheduler.memory.flush())

    def _pong(self, now: float) -> Pong:
        scheduler = self._scheduler
        if scheduler is None:
            return Pong(False, "the model is still loading")
        problem = self._problem(scheduler, now)
        warning = scheduler.handovers.warning(now) or self._kv_problem(scheduler, now)
        peers = scheduler.handovers.membership
        host, port = peers.found_at() or ("", None)
        identity = Identity(self._ctx.epoch, scheduler.role, host, port)
        # Only an instance with automatic placement may be chosen for prompts that it was not named for.
        is_free = peers.refusal() is None and scheduler.options.disaggregation_threshold == "auto"
        pace = scheduler.estimator.pace(now) if is_free else None
        return Pong(problem is None, problem or warning or "", identity, pace)

    def _kv_problem(self, scheduler: Scheduler, now: float) -> str:
        debug, tiers = scheduler.memory.debug, scheduler.tiers
        found = debug.problem if debug is not None else ""
        return found or (tiers.problem(now) if tiers is not None else "")

    def _problem(self, scheduler: Scheduler, now: float) -> str | None:
        if scheduler.draining:
            return "the instance is draining"
        if self._occupation is not None and self._occupation.refusal is not None:
            return self._occupation.refusal
        since = scheduler.in_flight_since
        if since is not None and now - since > self._ctx.options.watchdog_timeout:
            return f"the model worker has been busy with one step for {now - since:.0f} s"
        return scheduler.handovers.membership.problem(now)

    def _tell_drained(self, scheduler: Scheduler) -> None:
        # After all requests have ended, the result of a step under way has no reader: don't wait for it.
        if scheduler.draining and not (scheduler.reqs or self._unread or self._drained_sent):
            self._outbox.answer(Drained())
            self._drained_sent = True
            log.info("drained")

    def _check_idle(self, scheduler: Scheduler, now: float) -> None:
        is_due = now - self._checked_at >= IDLE_CHECK_INTERVAL and self._checked_step != scheduler.counters.steps
        if is_due and scheduler.is_idle:
            scheduler.check_invariants()
            self._checked_at, self._checked_step = now, scheduler.counters.steps
            self._verdict = Verdict("ok", scheduler.counters.steps)
            gc_control.collect_if_due()


def main() -> None:
    """Run the child process of an instance that takes part in no hand-over."""
    ctx = start_child(sys.argv)
    return_freed_memory()
    SchedulerProcess(ctx).run()


if __name__ == "__main__":
    main()
