"""The route that a bootstrap server gives out.

    (none) ─register─▶ current ─▶ withdrawn, expired or replaced by another epoch

A renewal keeps the lease; an expired lease can be renewed, since its owner may only have been slow. An epoch that was
replaced or has withdrawn is over: what still arrives from it is refused, so that it can't come back over its successor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .bootstrap import Route
from .errors import RouteConflict, RouteUnavailable

MAX_RETIRED = 1024


class RouteRegistry:
    """Holds one route. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._route: Route | None = None
        self._expires = 0.0
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)

    def register(self, route: Route) -> None:
        """Make ``route`` the current one, or renew its lease; raises ``RouteConflict`` for an epoch that is over."""
        if route.epoch in self._retired:
            raise RouteConflict(f"epoch {route.epoch} has withdrawn or was replaced by a newer instance")
        if self._route is not None and self._route.epoch != route.epoch:
            self._retired.append(self._route.epoch)
        self._route = route
        self._expires = self._clock() + route.ttl

    def current(self) -> Route:
        """The route; raises ``RouteUnavailable`` with the reason why there is none."""
        if self._route is None:
            raise RouteUnavailable(
                "the prefill instance is draining" if self._retired else "the prefill instance has not registered yet"
            )
        late = self._clock() - self._expires
        if late > 0:
            raise RouteUnavailable(
                f"the lease of the prefill instance ran out {late:.1f} s ago: it hangs or has just died"
            )
        return self._route

    def withdraw(self, epoch: str) -> None:
        """Take the route of ``epoch`` out; raises ``RouteConflict`` where it is not the current one.

        Withdrawing twice is fine.
        """
        if epoch in self._retired:
            return
        if self._route is None or self._route.epoch != epoch:
            raise RouteConflict(f"epoch {epoch} is not registered here")
        self._retired.append(epoch)
        self._route = None
