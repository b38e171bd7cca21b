"""Search through every order in which things can happen in a small scene.

It goes breadth first, so the trace of the first violation is a shortest one; or by random walks, which need fewer moves
for the same states.

States aren't copied, because the real code holds what can't be. Each is reached anew, by the moves that led to it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol


class Scene(Protocol):
    """What is explored."""

    def moves(self) -> list[str]:
        """Return what can happen now, always in the same order; nothing at the end."""

    def make(self, move: int) -> None:
        """Let the move of that number happen. Raises ``Violation``."""

    def signature(self) -> int:
        """Return a hash of the state."""

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
    """Explore every state that can be reached from ``stage()``, until a violation or a limit."""
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
            problem = _made(scene, partial(scene.make, move))
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


def _made(scene: Scene, make: Callable[[], object]) -> str | None:
    """Make a move; what is wrong then, if anything."""
    try:
        make()
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


class PartialScene(Scene, Protocol):
    """A scene of parties. Moves that change different parties lead to the same state in either order, whatever else
    has happened. A move's name tells it from all others that can be made in the same state.
    """

    def make_and_tell(self, move: int) -> frozenset[str]:
        """Make a move and return the parties that it has changed. Raises ``Violation``."""


@dataclass
class _Place:
    """A state to go on from.

    ``path``: the moves that lead there. ``untried``: moves to make there, number and name. ``asleep``: names of moves
    that need not be made there, with the parties that they change. The states after them are reached in another order.
    """

    path: tuple[int, ...]
    untried: list[tuple[int, str]]
    asleep: dict[str, frozenset[str]]


def explore_by_walks(stage: Callable[[], PartialScene], *, seed: int, states: int = MOST_STATES) -> Found:
    """Explore every state that can be reached from ``stage()`` by random walks, until a violation or until there are
    ``states``.

    Each walk begins where an earlier one left a move untried, and ends where nothing is new. So a search that
    ``states`` ends has seen states of every depth, the same ones each time. A trace is not a shortest one.

    Of two moves that change different parties, one order is enough if both lead to the same state. Sleep sets
    (Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, 1996) leave the other order out. They
    leave out no state, only ways to states that are seen anyway.
    """
    rng = random.Random(seed)
    found = Found()
    asleep_at: dict[int, set[str]] = {}
    places = [_Place((), _shuffled(enumerate(stage().moves()), rng), {})]
    place: _Place | None = None
    while places and found.states < states:
        place = _pop_any(places, rng)
        scene = stage()
        for move in place.path:
            scene.make(move)
        while place is not None and found.states < states:
            move, name = place.untried.pop()
            if place.untried:
                places.append(place)
            path = (*place.path, move)
            found.moves, found.depth = found.moves + 1, max(found.depth, len(path))
            changed: list[frozenset[str]] = []
            problem = _made(scene, partial(_note_parties, scene, move, changed))
            if problem is not None:
                found.violation, found.trace = problem, _trace(stage, path)
                return found
            asleep = {other: parties for other, parties in place.asleep.items() if not parties & changed[0]}
            place.asleep[name] = changed[0]
            untried = _untried(scene, asleep, asleep_at, found)
            place = _Place(path, _shuffled(untried, rng), asleep) if untried else None
    found.complete = not places and place is None
    return found


def _untried(
    scene: Scene, asleep: dict[str, frozenset[str]], asleep_at: dict[int, set[str]], found: Found
) -> list[tuple[int, str]]:
    """Return the moves that are to be made in the state that was just reached. ``asleep_at``: by state, the moves that
    have not been made there so far.
    """
    state, moves = scene.signature(), scene.moves()
    before = asleep_at.get(state)
    if before is None:
        found.states += 1
        found.endings += not moves
        asleep_at[state] = set(asleep)
        return [(i, name) for i, name in enumerate(moves) if name not in asleep]
    asleep_at[state] = before & asleep.keys()
    return [(i, name) for i, name in enumerate(moves) if name in before and name not in asleep]


def _note_parties(scene: PartialScene, move: int, changed: list[frozenset[str]]) -> None:
    changed.append(scene.make_and_tell(move))


def _shuffled(moves: Iterable[tuple[int, str]], rng: random.Random) -> list[tuple[int, str]]:
    shuffled = list(moves)
    rng.shuffle(shuffled)
    return shuffled


def _pop_any(places: list[_Place], rng: random.Random) -> _Place:
    i = rng.randrange(len(places))
    places[i], places[-1] = places[-1], places[i]
    return places.pop()
