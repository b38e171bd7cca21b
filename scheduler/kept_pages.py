"""KV pages that somebody wants to find in the store later, and waits to hear that they are there.

SAVING (on their way to the host and the store) → KEEPING (the store is asked which it has, and to keep them) → done.
Where the store lacks some that the host has, they are sent once more. Whoever waits is told after ``MOST_SECONDS`` at
the latest: a store that is slow or dead costs the pages, and nobody's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..messages.tiers import KeepPages, PagesKept

MOST_SECONDS = 20.0
TRIES = 2


class Kept(NamedTuple):
    """So many of the first pages are in the store; ``problem`` where those are not all."""

    pages: int
    problem: str = ""


class SavesPages(Protocol):
    """What is asked of the tiers."""

    def is_saving(self, hashes: Sequence[bytes]) -> bool:
        """Whether some are yet on their way to the store."""

    def save_again(self, hashes: Sequence[bytes]) -> None:
        """The store has none of these, whatever it was thought to have."""

    def tell_store(self, message: KeepPages) -> None:
        """Send it."""

    def problem(self, now: float) -> str:
        """What is wrong with the store, "" for nothing."""


@dataclass(slots=True, eq=False)
class _Wish:
    hashes: list[bytes]
    until: float
    deadline: float
    done: Callable[[Kept], None]
    tries: int = 0
    asked: int | None = None
    """The ``KeepPages`` that is not answered yet."""


class KeptPages:
    """Owner of what is waited for. ``next_id``: of messages to the worker."""

    def __init__(self, tiers: SavesPages, next_id: Callable[[], int]) -> None:
        self._tiers = tiers
        self._next_id = next_id
        self._wishes: list[_Wish] = []

    def want(self, hashes: list[bytes], until: float, now: float, done: Callable[[Kept], None]) -> None:
        """``done`` is called once, with what has become of these pages, which are being saved."""
        self._wishes.append(_Wish(hashes, until, now + MOST_SECONDS, done))

    def release(self, hashes: list[bytes]) -> None:
        """They may go."""
        self._tiers.tell_store(KeepPages(self._next_id(), b"".join(hashes), 0.0))

    def advance(self, now: float) -> None:
        """Ask for what has been saved; give up what has taken too long."""
        for wish in list(self._wishes):
            if now > wish.deadline:
                late = f"the KV store did not take it within {MOST_SECONDS:.0f} s"
                self._end(wish, Kept(0, "; ".join(filter(None, (late, self._tiers.problem(now))))))
            elif wish.asked is None and not self._tiers.is_saving(wish.hashes):
                wish.asked = self._next_id()
                wish.tries += 1
                self._tiers.tell_store(KeepPages(wish.asked, b"".join(wish.hashes), wish.until))

    def on_kept(self, event: PagesKept) -> None:
        """The store says what it has."""
        wish = next((wish for wish in self._wishes if wish.asked == event.id), None)
        if wish is None:
            return
        wish.asked = None
        if event.count < len(wish.hashes) and not event.error and wish.tries < TRIES:
            self._tiers.save_again(wish.hashes[event.count :])
            return
        short = "" if event.count == len(wish.hashes) else event.error or "host memory or the KV store has no room"
        self._end(wish, Kept(event.count, short))

    def timeout(self, now: float) -> float | None:
        """Seconds until somebody has waited too long; None: nobody waits."""
        return max(0.0, min(wish.deadline for wish in self._wishes) - now) if self._wishes else None

    def _end(self, wish: _Wish, kept: Kept) -> None:
        self._wishes.remove(wish)
        wish.done(kept)
