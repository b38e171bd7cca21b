"""Requests that are suspected of crashing the instances that serve them, by the digest of their bodies.

    unknown ──an instance dies while it has the request──▶ suspected ──``MOST_DEATHS`` within a minute──▶ quarantined
       ▲                                                      │ it is served, or a minute passes               │
       └──────────────────────────────────────────────────────┴────────────────a minute passes─────────────────┘

A quarantined request is sent to no instance. All requests that an instance had when it died are suspected, because the
router does not know which one was the cause. The harmless ones are cleared when they are served.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

MOST_DEATHS = 2
"""Deaths within ``WINDOW_SECONDS`` that quarantine a request."""
WINDOW_SECONDS = 60.0
MAX_SUSPECTS = 4096
"""Maximum number of remembered requests. If there are more, the one that was suspected first is forgotten."""
INLINE_BYTES = 1 << 20
"""Maximum length of a body that is hashed on the event loop, which takes 1 ms."""


class Death(NamedTuple):
    """Death of an instance."""

    url: str
    at: float
    """Time (``time.monotonic()``)."""


class Quarantine:
    """Suspected and quarantined requests. Event-loop thread only. ``clock``: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, list[Death]] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether any request is suspected. If not, no digest needs to be computed."""
        return bool(self._deaths)

    def record(self, digest: bytes, url: str, begun_at: float) -> None:
        """Note that the instance at ``url`` died while it had this request, which it was sent at ``begun_at``.

        ``digest``: of the request's body. If the instance had several requests with this body when it died, the death
        is recorded once.
        """
        deaths = self._recent(digest)
        if any(death.url == url and death.at >= begun_at for death in deaths):
            return
        self._deaths[digest] = [*deaths, Death(url, self._clock())]
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)

    def clear(self, digest: bytes) -> None:
        """Note that the request with this ``digest`` was served, so it is harmless: forget the deaths during it."""
        self._deaths.pop(digest, None)

    def culprits(self, digest: bytes) -> list[Death]:
        """Return the deaths of instances for which the request with this ``digest`` is to be refused.

        Return an empty list if it may be served: fewer than ``MOST_DEATHS`` died during it lately.
        """
        deaths = self._recent(digest)
        if not deaths:
            self._deaths.pop(digest, None)
        return deaths if len(deaths) >= MOST_DEATHS else []

    def _recent(self, digest: bytes) -> list[Death]:
        since = self._clock() - WINDOW_SECONDS
        return [death for death in self._deaths.get(digest, ()) if death.at > since]


async def digest_of(raw: bytes) -> bytes:
    """Return a body's digest. Long ones are hashed in a thread, so that no stream waits for it."""
    if len(raw) <= INLINE_BYTES:
        return _digest(raw)
    return await asyncio.to_thread(_digest, raw)


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()
