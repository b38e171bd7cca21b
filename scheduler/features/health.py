"""Whether the instance can serve: the answer to each ping of ``/health``."""

from __future__ import annotations

from collections.abc import Sequence

from ...messages.control import Identity, Ping, Pong
from ..feature import Feature
from ..handlers import answers
from ..scheduler import Scheduler


class Watchdog(Feature):
    """Notices a model worker that is stuck in a step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def problem(self, now: float) -> str | None:
        """See ``Feature``."""
        since = self._scheduler.in_flight_since
        if since is not None and now - since > self._scheduler.options.watchdog_timeout:
            return f"the model worker has been busy with one step for {now - since:.0f} s"
        return None


class Health(Feature):
    """Answers pings with the first problem, or the first warning, of ``features``."""

    def __init__(self, scheduler: Scheduler, epoch: str, features: Sequence[Feature]) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._features = features

    @answers(Ping)
    def ping(self, question: Ping, now: float) -> Pong:
        """Return whether the instance can serve, and how peers and routers know it."""
        problem = next((text for f in self._features if (text := f.problem(now)) is not None), None)
        warning = next((text for f in self._features if (text := f.warning(now))), "")
        scheduler, peers = self._scheduler, self._scheduler.handovers.membership
        host, port = peers.found_at() or ("", None)
        identity = Identity(self._epoch, scheduler.role, host, port)
        # Only an instance with automatic placement may be chosen for prompts that it was not named for.
        is_free = peers.refusal() is None and scheduler.options.disaggregation_threshold == "auto"
        pace = scheduler.estimator.pace(now) if is_free else None
        return Pong(problem is None, problem or warning, identity, pace)
