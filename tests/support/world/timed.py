"""Drives a world by chance, under virtual time: each thing that waits happens after a delay of its channel's kind."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from support.world.world import Channel, Violation, World

MEAN_DELAYS = {
    "client": 0.002,
    "worker": 0.004,
    "transfer": 0.001,
    "events": 0.0005,
    "control": 0.001,
    "data": 0.0005,
    "late": 1.0,
    "find": 0.003,
}
"""Seconds. Now and then, one takes fifty times as long."""
BLOCKED_SECONDS = 60.0
"""A page that was not granted by then never will be."""
AGAIN_SECONDS = 0.005


class Chance:
    """See the module. ``held``: channels in which nothing happens now, as their reader hangs."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.rng = rng
        self.held: Callable[[Channel], bool] = lambda channel: False
        self.happened = 0
        self.trace: list[str] | None = None
        """Where not None, what happens is noted in it."""
        self._world = world
        self._numbers = itertools.count()
        self._due: dict[Channel, float] = {}
        self._heap: list[tuple[float, int, Channel | Callable[[], None]]] = []
        self._blocked: dict[Channel, float] = {}
        world.posted = self._posted

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call ``act`` at the time ``when``."""
        heapq.heappush(self._heap, (when, next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``seconds``."""
        self.at(self._world.now + seconds, act)

    def run(self, until: float) -> None:
        """Let happen what is due until then."""
        world = self._world
        while self._heap and self._heap[0][0] <= until:
            due, _, what = heapq.heappop(self._heap)
            world.now = max(world.now, due)
            if callable(what):
                what()
            else:
                self._step(what)
        world.now = max(world.now, until)

    def _step(self, channel: Channel) -> None:
        world = self._world
        if channel not in world.channels:
            return  # what was to happen was forgotten
        waiting = world.channels[channel][0]
        is_held = self.held(channel)
        if is_held or (waiting.ready is not None and not waiting.ready()):
            since = self._blocked.setdefault(channel, world.now)
            if is_held:
                self._blocked[channel] = world.now
            elif world.now - since > BLOCKED_SECONDS:
                raise Violation(f"{waiting.what}, and nobody granted that")
            heapq.heappush(self._heap, (world.now + AGAIN_SECONDS, next(self._numbers), channel))
            return
        self._blocked.pop(channel, None)
        self.happened += 1
        if self.trace is not None:
            self.trace.append(f"{world.now:.4f} {waiting.what}")
        world.step(channel)

    def _posted(self, channel: Channel) -> None:
        mean = MEAN_DELAYS[str(channel[0])] * (50 if self.rng.random() < 0.004 else 1)
        due = max(self._due.get(channel, 0.0), self._world.now + self.rng.expovariate(1 / mean))
        if channel in self._world.channels and len(self._world.channels[channel]) == 1:
            self._blocked.pop(channel, None)
        self._due[channel] = due
        heapq.heappush(self._heap, (due, next(self._numbers), channel))
