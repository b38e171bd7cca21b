"""The scheduler of an instance with a loaded model, and all of its features: one tick after another.

In a tick, hand-overs and memory come first, because steps are planned with the memory that they leave. Then steps are
planned and sent. What looks at the result follows: profiles, the drain's end, metrics, KV events. Checks of an idle
instance wait until the tick's messages are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from ..messages.requests import AbortReq, ForkedReq, GenerateReq, StopReq
from ..messages.worker import StepResult, WorkerReady
from ..runtime.child import ChildContext
from .feature import Feature
from .features.cache_flush import CacheFlush
from .features.drain import DrainFeature
from .features.handovers import HandoverFeature
from .features.health import Health, Watchdog
from .features.idle_check import IdleCheck
from .features.kv_event_feed import KVEventFeed
from .features.kv_hashes import KVHashing
from .features.memory_saver import MemorySaver
from .features.metrics_report import MetricsReport
from .features.pool_resize import PoolResize
from .features.pressure import PressureMeter
from .features.profiling import Profiling
from .features.server_info import ServerInfoFeature
from .features.sessions import SessionFeature
from .features.tiers import TierFeature
from .handlers import Handlers, receives
from .handover import Handovers
from .options import SchedulerOptions
from .outbox import Outbox
from .scheduler import Scheduler

MakeHandovers = Callable[[Scheduler, zmq.Poller], Handovers]
"""Factory of the hand-overs. They register what they wait for with the loop's poller."""


class LoadedInstance:
    """The scheduler and its features. ``all_read`` returns whether no message waits for a later tick."""

    def __init__(
        self,
        ctx: ChildContext[SchedulerOptions],
        worker: WorkerReady,
        outbox: Outbox,
        poller: zmq.Poller,
        make_handovers: MakeHandovers,
        all_read: Callable[[], bool],
    ) -> None:
        scheduler = self.scheduler = Scheduler(ctx.options, worker, outbox, lambda each: make_handovers(each, poller))
        scheduler.handovers.membership.register()
        memory, planner, peers = scheduler.memory, scheduler.planner, scheduler.handovers.membership
        self._idle_check = IdleCheck(scheduler)
        handovers = HandoverFeature(scheduler.handovers, scheduler.instance_role, lambda: scheduler.has_freed)
        pressure, memory_saver, resize = (
            PressureMeter(memory.pool, planner),
            MemorySaver(scheduler),
            PoolResize(scheduler),
        )
        draining = DrainFeature(scheduler, all_read)
        watchdog = Watchdog(lambda: scheduler.in_flight_since, ctx.options.watchdog_timeout)
        profiling = Profiling(outbox, lambda: memory.pool.newest_step)
        tiers = TierFeature(scheduler.tiers)
        hashing = KVHashing(memory, scheduler.worker.layout, outbox)
        report = MetricsReport(scheduler, [handovers, tiers, hashing, pressure, memory_saver])
        feeds = make_kv_feeds(ctx, scheduler, poller)
        shown = [handovers, tiers, hashing, memory_saver, resize, pressure, profiling]
        watched = [draining, memory_saver, watchdog, handovers, hashing, tiers]
        # Only an instance with automatic placement may be chosen for prompts that it was not named for.
        pace = scheduler.estimator.pace if ctx.options.disaggregation_threshold == "auto" else no_pace
        self._before_steps: list[Feature] = [handovers, resize, memory_saver]
        self._after_steps: list[Feature] = [profiling, draining, pressure, report, *feeds]
        self._timed: list[Feature] = [handovers, resize, memory_saver, tiers, profiling, *feeds, self._idle_check]
        asked = [
            *(SessionFeature(scheduler), CacheFlush(memory, scheduler.reqs), hashing, tiers),
            ServerInfoFeature(scheduler, ctx.epoch, self._idle_check, shown),
            Health(ctx.epoch, watched, peers, scheduler.instance_role, pace),
        ]
        self.handlers = Handlers(outbox, self, scheduler.grammars, *self._before_steps, *self._after_steps, *asked)

    # --- requests and steps ---

    @receives(GenerateReq)
    def on_request(self, message: GenerateReq, now: float) -> None:
        """Admit a client's request, or send its client an error with the reason."""
        self.scheduler.arrivals.admit(message, now)

    @receives(ForkedReq)
    def on_forks(self, message: ForkedReq, now: float) -> None:
        """Admit the requests that a prompt with several answers stands for; each may be refused with an error."""
        for request in message.requests():
            self.scheduler.arrivals.admit(request, now)

    @receives(AbortReq)
    def on_abort(self, message: AbortReq, now: float) -> None:
        """End the requests that the message names as aborted."""
        self.scheduler.abort(message)

    @receives(StopReq)
    def on_stop(self, message: StopReq, now: float) -> None:
        """End a request as finished: its text has a stop string."""
        self.scheduler.stop(message)

    @receives(StepResult)
    def on_step_result(self, result: StepResult, now: float) -> None:
        """Record the tokens that the worker has computed in a step, which ends requests that are complete."""
        self.scheduler.on_step_result(result, now)

    # --- the loop ---

    def begin(self, now: float) -> None:
        """Begin a tick: set the scheduler's clock to ``now``, before messages are handled."""
        self.scheduler.now = now

    def tick(self, now: float) -> None:
        """Advance all features, plan and send the steps that can be computed, and send what is queued for peers."""
        for feature in self._before_steps:
            feature.tick(now)
        self.scheduler.run_steps(now)
        for feature in self._after_steps:
            feature.tick(now)
        # Flush peers first: "drained" is sent with the outbox, and what peers wait for must be sent by then.
        self.scheduler.handovers.flush()

    def after_send(self, ended: list[str], now: float) -> None:
        """Do what can wait until the tick's messages are sent: learning, and the invariant checks of an idle instance.

        ``ended``: rids of requests with a report that was too long to send. They are stopped.
        """
        for rid in ended:
            self.scheduler.stop(StopReq(rid))
        self.scheduler.catch_up()
        self._idle_check.tick(now)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until ``tick`` has something to do without a message; infinity for never."""
        return min(self.scheduler.deadlines.seconds_left(now), *[feature.seconds_left(now) for feature in self._timed])


def no_pace(now: float) -> None:
    """Return None: routers may not choose the instance for prompts by themselves."""


def make_kv_feeds(ctx: ChildContext[SchedulerOptions], scheduler: Scheduler, poller: zmq.Poller) -> list[Feature]:
    """Make the feed of KV events, the replays of which wake the loop. Return [] if the options name no endpoint."""
    endpoint = ctx.options.kv_events_endpoint
    if scheduler.kv_events is None or endpoint is None:
        return []
    feed = KVEventFeed(ctx.zmq_ctx, ctx.options, scheduler.kv_events, endpoint)
    if feed.replay is not None:
        poller.register(feed.replay, zmq.POLLIN)
    return [feed]
