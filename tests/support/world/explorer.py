"""Every order in which things can happen, of a scene that is small enough: breadth first, so that the trace of the
first violation is a shortest one.

States aren't copied, the real code holds what can't be: each is reached anew, by the moves that led to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Scene(Protocol):
    """What is explored."""

    def moves(self) -> list[str]:
        """What can happen now, always in the same order; nothing where it is over."""

    def make(self, move: int) -> None:
        """Let the move of that number happen. Raises ``Violation``."""

    def signature(self) -> int:
        """Of the state."""

    def check(self, *, over: bool) -> None:
        """Raises where the state is one that must never be; ``over``: nothing can happen any more."""


MOST_STATES = 10_000_000


@dataclass
class Found:
    """``trace``: what led to ``violation``, where there was one. ``complete``: everything was seen."""

    states: int = 0
    moves: int = 0
    depth: int = 0
    endings: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)
    complete: bool = False

    def __str__(self) -> str:
        seen = f"{self.states} states, {self.moves} moves, {self.endings} endings, {self.depth} deep"
        if self.violation is None:
            return seen + ("" if self.complete else ", and there is more")
        return f"{seen}: {self.violation}\n" + "\n".join(f"  {i}. {what}" for i, what in enumerate(self.trace, 1))


def explore(stage: Callable[[], Scene], *, seconds: float, states: int = MOST_STATES) -> Found:
    """Every state that can be reached from ``stage()``, until a violation, or until a limit."""
    found = Found()
    seen: set[int] = set()
    waiting: deque[tuple[int, ...]] = deque([()])
    ends_at = time.monotonic() + seconds
    while waiting:
        if time.monotonic() > ends_at or found.states >= states:
            return found
        path = waiting.popleft()
        scene = stage()
        for move in path:
            scene.make(move)
        moves = scene.moves()
        found.endings += not moves
        found.depth = max(found.depth, len(path))
        for move in range(len(moves)):
            if move:  # the first one goes on from here
                scene = stage()
                for earlier in path:
                    scene.make(earlier)
            found.moves += 1
            problem = _made(scene, move)
            if problem is not None:
                found.violation, found.trace = problem, _trace(stage, (*path, move))
                return found
            state = scene.signature()
            if state not in seen:
                seen.add(state)
                found.states += 1
                waiting.append((*path, move))
    found.complete = True
    return found


def _made(scene: Scene, move: int) -> str | None:
    """Make a move; what is wrong then, if anything."""
    try:
        scene.make(move)
        scene.check(over=not scene.moves())
    except Exception as e:  # noqa: BLE001
        # Whatever it is: a process would have ended by it.
        return f"{type(e).__name__}: {e}"
    return None


def _trace(stage: Callable[[], Scene], path: tuple[int, ...]) -> list[str]:
    scene, trace = stage(), []
    for i, move in enumerate(path):
        trace.append(scene.moves()[move])
        if i < len(path) - 1:
            scene.make(move)
    return trace
