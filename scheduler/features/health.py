"""Whether the instance can serve: the answer to each ping of ``/health``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...messages.control import Identity, Pace, Ping, Pong
from ..feature import Feature
from ..handlers import answers
from ..handover import Membership
from ..role import CurrentRole


class Watchdog(Feature):
    """Notices a model worker that is stuck in a step.

    ``in_flight_since`` returns when the oldest step under way was sent, or None. ``timeout``: seconds for one step.
    """

    def __init__(self, in_flight_since: Callable[[], float | None], timeout: float) -> None:
        self._in_flight_since = in_flight_since
        self._timeout = timeout

    def problem(self, now: float) -> str | None:
        """Return that the oldest step under way has lasted longer than ``timeout`` seconds, or None."""
        since = self._in_flight_since()
        if since is not None and now - since > self._timeout:
            return f"the model worker has been busy with one step for {now - since:.0f} s"
        return None


class Health(Feature):
    """Answers pings with the first problem, or the first warning, of ``features``.

    ``pace`` returns the pace at a time, or None if routers may not choose this instance for prompts by themselves.
    """

    def __init__(
        self,
        epoch: str,
        features: Sequence[Feature],
        peers: Membership,
        role: CurrentRole,
        pace: Callable[[float], Pace | None],
    ) -> None:
        self._epoch = epoch
        self._features = features
        self._peers = peers
        self._role = role
        self._pace = pace

    @answers(Ping)
    def ping(self, question: Ping, now: float) -> Pong:
        """Answer a health check: whether the instance can serve, the first problem or warning, its identity and its
        pace.

        The pace is None if routers may not choose this instance for prompts by themselves, or while it exchanges no KV.
        """
        problem = next((text for f in self._features if (text := f.problem(now)) is not None), None)
        warning = next((text for f in self._features if (text := f.warning(now))), "")
        host, port = self._peers.found_at() or ("", None)
        identity = Identity(self._epoch, self._role.mode, host, port)
        pace = self._pace(now) if self._peers.refusal() is None else None
        return Pong(problem is None, problem or warning, identity, pace)
