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
from typing import Any

import zmq

from ..messages.channel import Receiver, Sender, UndeclaredMessage
from ..messages.routes import ToScheduler, ToSchedulerFromWorker
from ..messages.worker import WorkerReady
from ..runtime import gc_control
from ..runtime.child import ChildContext, start_child
from ..runtime.malloc import return_freed_memory
from .handover import Handovers, NoHandovers
from .instance import LoadedInstance, MakeHandovers
from .loading import LoadingInstance
from .options import SchedulerOptions
from .outbox import NO_TRANSFER_ENGINE, Outbox
from .scheduler import Scheduler

log = logging.getLogger(__name__)
OPTIONS = SchedulerOptions

MAX_SLEEP_MS = 60_000
FRAMES_A_TICK = 1024
"""Maximum frames read from one channel before the other channels and the peers are served.

The poller wakes the loop for the rest.
"""
MESSAGES_A_TICK = 256
"""Maximum number of requests and questions handled per tick: admitting a request takes up to 50 µs."""


def no_handovers(scheduler: Scheduler, poller: zmq.Poller) -> Handovers:
    """Return the hand-overs of an instance that exchanges no KV."""
    return NoHandovers()


class SchedulerProcess:
    """Owner of the sockets; see the module. Without ``make_handovers`` the instance exchanges no KV."""

    def __init__(self, ctx: ChildContext[SchedulerOptions], make_handovers: MakeHandovers = no_handovers) -> None:
        self._ctx = ctx
        self._make_handovers = make_handovers
        self._inbox: Receiver[Any] = Receiver(ctx.zmq_ctx, ctx.address("scheduler"), ToScheduler)
        self._events: Receiver[Any] = Receiver(ctx.zmq_ctx, ctx.address("worker_events"), ToSchedulerFromWorker)
        self._outbox = Outbox(
            Sender(ctx.zmq_ctx, ctx.address("worker")),
            Sender(ctx.zmq_ctx, ctx.address("detokenizer")),
            Sender(ctx.zmq_ctx, ctx.address("transfer")) if ctx.options.hands_over else NO_TRANSFER_ENGINE,
        )
        self._unread: deque[Any] = deque()
        """Messages that were read and are handled in a later tick."""
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._events.socket, zmq.POLLIN)
        self.instance: LoadingInstance | LoadedInstance = LoadingInstance(self._outbox, self._start)

    def run(self) -> None:
        """Run ticks for ever. Errors that the process cannot survive are raised."""
        while True:
            self.tick()

    def tick(self) -> None:
        """Wait for messages or a deadline, handle the messages, plan and send steps, and send all answers."""
        self._poller.poll(self._timeout_ms())
        now = time.monotonic()
        self.instance.begin(now)
        for message in self._drain(self._events):
            self.instance.handlers.handle(message, now)
        for message in self._next_messages():
            self.instance.handlers.handle(message, now)
        self.instance.tick(now)
        self.instance.after_send(self._outbox.flush(), now)

    def _start(self, worker: WorkerReady, now: float) -> None:
        all_read = lambda: not self._unread  # noqa: E731
        self.instance = LoadedInstance(self._ctx, worker, self._outbox, self._poller, self._make_handovers, all_read)
        # A request leaves no reference cycles, and the tree may have as many nodes as the pool has pages.
        gc_control.defer_full_collections()
        self._ctx.report_ready(worker.load_seconds)

    def _timeout_ms(self) -> int:
        if self._unread:
            return 0
        left = self.instance.seconds_left(time.monotonic())
        return -1 if math.isinf(left) else min(math.ceil(left * 1000), MAX_SLEEP_MS)

    def _next_messages(self) -> list[Any]:
        """Read the requests and questions that have come, and return the next ones to handle, at most
        ``MESSAGES_A_TICK``.

        The rest waits for a later tick.
        """
        if len(self._unread) < MESSAGES_A_TICK:
            self._unread += self._drain(self._inbox)
        return [self._unread.popleft() for _ in range(min(len(self._unread), MESSAGES_A_TICK))]

    def _drain(self, receiver: Receiver[Any]) -> list[Any]:
        messages: list[Any] = []
        for _ in range(FRAMES_A_TICK):
            try:
                batch = receiver.recv(0)
            except UndeclaredMessage as e:
                log.error("%s", e)
                continue
            if not batch:
                break
            messages += batch
        return messages


def main() -> None:
    """Run the scheduler process of an instance that takes part in no hand-over."""
    ctx = start_child(sys.argv, OPTIONS)
    return_freed_memory()
    SchedulerProcess(ctx).run()


if __name__ == "__main__":
    main()
