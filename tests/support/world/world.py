"""A world of instances in one thread: everything that is under way between two ends waits in a channel.

The driver of the world picks the channel with the next event. A channel keeps its order; between channels there is
none. Drivers are chance under virtual time (``timed.py``), and a search through every order (``explorer.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

Channel = tuple[Hashable, ...]
"""Its kind, then what tells it from others of its kind."""


class Violation(AssertionError):
    """What must never be has come to be."""


class Happening(NamedTuple):
    """``what`` is for people and, with ``content``, tells it from others. ``ready``: whether it can happen now."""

    what: str
    act: Callable[[], None]
    content: bytes = b""
    ready: Callable[[], bool] | None = None


class World:
    """``now``: seconds, moved by the driver. ``posted``: called for each happening that begins to wait."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.channels: dict[Channel, deque[Happening]] = {}
        self.posted: Callable[[Channel], None] = lambda channel: None
        self.listening: dict[tuple[str, int], Any] = {}
        """Control ports."""
        self.registries: dict[tuple[str, int], Any] = {}
        """Registries of bootstrap servers, by address."""
        self.pools: dict[bytes, Any] = {}
        """Transfer backends, by what they are reached by."""
        self.answers: dict[str, list[int]] = {}
        """What the prompt of each request leads to."""
        self.ends: dict[tuple[str, str], Any] = {}
        """How each leg ended, by instance and request."""
        self._last = 0

    def number(self) -> int:
        """Return a fresh number."""
        self._last += 1
        return self._last

    def post(
        self,
        channel: Channel,
        what: str,
        act: Callable[[], None],
        content: bytes = b"",
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Let ``act`` happen after everything before it in ``channel``."""
        self.channels.setdefault(channel, deque()).append(Happening(what, act, content, ready))
        self.posted(channel)

    def ready(self) -> list[Channel]:
        """Return the channels with an oldest event that can happen now, in the order of their first use."""
        return [c for c, waiting in self.channels.items() if waiting[0].ready is None or waiting[0].ready()]

    def step(self, channel: Channel) -> str:
        """Let the oldest thing of a channel happen; returns what it was."""
        waiting = self.channels[channel]
        happening = waiting.popleft()
        if not waiting:
            del self.channels[channel]
        happening.act()
        return happening.what

    def forget(self, channel: Channel, keep: int = 0) -> None:
        """Drop what waits in a channel, except the oldest ``keep``."""
        waiting = self.channels.get(channel)
        if waiting is None:
            return
        while len(waiting) > keep:
            waiting.pop()
        if not waiting:
            del self.channels[channel]
