"""Changes of a router's fleet while it runs. ``membership.py`` has the states of a member.

A drain ends when its instance has no request and no question left, or when its time is over. Requests that are left
then fail like those of an instance that died, and are retried elsewhere if nothing was sent to the client. Questions
that are left, such as to restore a session, may still be answered.
"""

from __future__ import annotations

import asyncio
import logging

from ..runtime.web.client.client import HttpClient
from .errors import ConflictError, NotFoundError
from .fleet import Fleet
from .health import HealthMonitor
from .instance import Instance, Role
from .membership import MemberState, Source

logger = logging.getLogger(__name__)

MAX_MEMBERS = 1024
"""Maximum number of instances. Each has a health check every second, and every choice looks at all of them."""
DRAIN_POLL_SECONDS = 0.1
"""Time between two looks at a draining instance. A drain takes seconds, and needs no hook in each of the counts."""


class Members:
    """The instances of a fleet, their health checks and their connections. Event-loop thread only."""

    def __init__(self, fleet: Fleet, monitor: HealthMonitor, client: HttpClient, drain_seconds: float) -> None:
        self._fleet = fleet
        self._monitor = monitor
        self._client = client
        self._drain_seconds = drain_seconds
        self._drains: dict[Instance, asyncio.TimerHandle] = {}
        """Next look at each draining instance."""
        self._drained_by: dict[Instance, Source] = {}
        """What ordered each drain. An admin's order, ``Source.API``, replaces one of the file."""

    def all(self) -> tuple[Instance, ...]:
        """Return the members, in the order in which they were added."""
        return self._fleet.instances

    def add(self, url: str, role: Role | None, bootstrap_port: int | None, source: Source) -> Instance:
        """Add the instance at ``url``, which has been checked, and begin to check its health.

        ``role``: None is a worker until the instance reports another role, which is before it gets a request. Raises
        ``ConflictError`` if there is such a member, draining ones included, or if there are ``MAX_MEMBERS``.
        """
        if known := next((i for i in self._fleet.instances if i.url == url), None):
            advice = '; PATCH its state to "ready" instead' if known.withheld is not None else ""
            raise ConflictError(f"url: {url} is a member, in state {known.member_state}{advice}")
        if len(self._fleet.instances) >= MAX_MEMBERS:
            raise ConflictError(f"this router has {MAX_MEMBERS} instances, the most that it takes; remove some first")
        instance = Instance(url, role or Role.UNIFIED, bootstrap_port, source)
        self._fleet.add(instance)
        self._monitor.watch(instance)
        logger.info("%s was added (%s)", instance, source)
        return instance

    def find(self, url: str) -> list[Instance]:
        """Return the members at ``url``: one, unless options named it several times. Raises ``NotFoundError``."""
        found = [i for i in self._fleet.instances if i.url == url]
        if not found:
            raise NotFoundError(f"url: no instance at {url}; GET /workers lists them")
        return found

    def readmit(self, instance: Instance) -> None:
        """Send a cordoned or draining instance requests again."""
        self._withhold(instance, None)

    def cordon(self, instance: Instance) -> None:
        """Send an instance no new requests. A drain of it ends."""
        self._withhold(instance, MemberState.CORDONED)

    def drain(self, instance: Instance, by: Source = Source.API) -> None:
        """Send an instance no new requests, and remove it when it has none left; at once if it has none now.

        ``by``: what orders it, an admin or the file. A second order changes neither the state nor the end of the time.
        """
        if instance in self._drains:
            if by is Source.API:
                self._drained_by[instance] = by
            return
        self._withhold(instance, MemberState.DRAINING)
        self._drained_by[instance] = by
        self._look_again(instance, asyncio.get_running_loop().time() + self._drain_seconds)

    def drained_by(self, instance: Instance) -> Source | None:
        """Return what ordered the drain of an instance; None if it does not drain."""
        return self._drained_by.get(instance)

    def remove(self, instance: Instance) -> None:
        """Remove an instance at once. The requests that it has fail, or are retried."""
        self._stop_drain(instance)
        self._monitor.unwatch(instance)
        self._fleet.remove(instance)
        self._client.forget(instance.url)
        logger.info("%s was removed", instance)

    def _withhold(self, instance: Instance, why: MemberState | None) -> None:
        self._stop_drain(instance)
        if instance.withheld is not why:
            self._fleet.withhold(instance, why)
            logger.info("%s is %s", instance, instance.member_state)

    def _stop_drain(self, instance: Instance) -> None:
        self._drained_by.pop(instance, None)
        if (timer := self._drains.pop(instance, None)) is not None:
            timer.cancel()

    def _look_again(self, instance: Instance, deadline: float) -> None:
        """Remove a draining instance if it is idle or ``deadline`` (loop time) has passed, or look again later."""
        loop = asyncio.get_running_loop()
        if instance.is_idle:
            self.remove(instance)
        elif loop.time() >= deadline:
            logger.warning(
                "%s still has %d requests and %d questions after %g s of draining; the requests end",
                *(instance, instance.in_flight, instance.asked, self._drain_seconds),
            )
            self.remove(instance)
        else:
            self._drains[instance] = loop.call_later(DRAIN_POLL_SECONDS, self._look_again, instance, deadline)
