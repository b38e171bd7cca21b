"""KV pages that somebody wants to find in the store later, and waits to hear that they are there.

A wish is SAVING (its pages are on their way to the host and the store) → READY → KEEPING (the store is asked which it
has, and to keep them) → done. Where the store lacks some that the host has, they are sent once more. Whoever waits is
told after ``MOST_SECONDS`` at the latest: a store that is slow or dead costs the pages, and nobody's answer.

A turn looks at what is due in it, however many wait: a wish that is SAVING waits for one page at a time, and goes on to
the next when that has ``left`` the way to the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

    def is_saving(self, page_hash: bytes) -> bool:
        """Whether it is yet on its way to the store."""

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
    done: Callable[[Kept], None] | None
    """None once it was called."""
    saved: int = 0
    """How many of the first are on their way no more."""
    tries: int = 0
    asked: int = 0
    """The latest ``KeepPages``."""


class KeptPages:
    """Owner of what is waited for. ``next_id``: of messages to the worker."""

    def __init__(self, tiers: SavesPages, next_id: Callable[[], int]) -> None:
        self._tiers = tiers
        self._next_id = next_id
        self._wishes: deque[_Wish] = deque()
        """As they came, so as their time will be over; those that are done go when they are the first."""
        self._saving: dict[bytes, set[_Wish]] = {}
        """By the page that each waits for."""
        self._ready: list[_Wish] = []
        self._keeping: dict[int, _Wish] = {}

    def want(self, hashes: list[bytes], until: float, now: float, done: Callable[[Kept], None]) -> None:
        """``done`` is called once, with what has become of these pages, which are being saved."""
        wish = _Wish(hashes, until, now + MOST_SECONDS, done)
        self._wishes.append(wish)
        self._wait(wish)

    def release(self, hashes: list[bytes]) -> None:
        """They may go."""
        self._tiers.tell_store(KeepPages(self._next_id(), b"".join(hashes), 0.0))

    def left(self, hashes: Iterable[bytes]) -> None:
        """These are on their way no more, whatever has become of them."""
        for page_hash in hashes:
            for wish in self._saving.pop(page_hash, ()):
                self._wait(wish)

    def advance(self, now: float) -> None:
        """Ask for what has been saved; give up what has taken too long. Once a turn."""
        while self._wishes and (self._wishes[0].done is None or now > self._wishes[0].deadline):
            wish = self._wishes.popleft()
            if wish.done is not None:
                late = f"the KV store did not take it within {MOST_SECONDS:.0f} s"
                self._end(wish, Kept(0, "; ".join(filter(None, (late, self._tiers.problem(now))))))
        ready, self._ready = self._ready, []
        for wish in ready:
            if wish.done is not None:
                wish.asked = self._next_id()
                wish.tries += 1
                self._keeping[wish.asked] = wish
                self._tiers.tell_store(KeepPages(wish.asked, b"".join(wish.hashes), wish.until))

    def on_kept(self, event: PagesKept) -> None:
        """The store says what it has."""
        wish = self._keeping.pop(event.id, None)
        if wish is None:
            return
        if event.count < len(wish.hashes) and not event.error and wish.tries < TRIES:
            self._tiers.save_again(wish.hashes[event.count :])
            wish.saved = event.count
            self._wait(wish)
            return
        short = "" if event.count == len(wish.hashes) else event.error or "host memory or the KV store has no room"
        self._end(wish, Kept(event.count, short))

    def timeout(self, now: float) -> float | None:
        """Seconds until somebody has waited too long; None: nobody waits. One that is done may be told for a while."""
        return max(0.0, self._wishes[0].deadline - now) if self._wishes else None

    def _wait(self, wish: _Wish) -> None:
        """For the next of its pages that is on its way."""
        while wish.saved < len(wish.hashes):
            page_hash = wish.hashes[wish.saved]
            if self._tiers.is_saving(page_hash):
                self._saving.setdefault(page_hash, set()).add(wish)
                return
            wish.saved += 1
        self._ready.append(wish)

    def _end(self, wish: _Wish, kept: Kept) -> None:
        self._keeping.pop(wish.asked, None)
        if wish.saved < len(wish.hashes) and (others := self._saving.get(wish.hashes[wish.saved])) is not None:
            others.discard(wish)
            if not others:
                del self._saving[wish.hashes[wish.saved]]
        done, wish.done = wish.done, None
        assert done is not None
        done(kept)
