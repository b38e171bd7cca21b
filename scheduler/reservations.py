"""Reservations: memory of incoming requests until their KV has arrived.

Also the limit of how much they may hold, and the count of how often requests have given theirs back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import xxhash

from .kv_memory import KVMemory
from .kv_pool import KVPool
from .memory_terms import NO_RESERVE, Reserve
from .req import Req, Route, hold_of

MOST_DOUBLINGS = 4
"""Maximum doublings of a request's patience: one for each time that it gave its memory back."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory of an incoming request, until its KV has arrived."""

    req: Req
    begun: bool
    """Whether the sender computes or sends, or had begun before it was asked. True from the grant on if it is optional:
    its sender has the KV, and needs no memory to send it.
    """
    patience: float
    """Seconds without progress after which the reservation may be asked back for a claim of its own rank."""
    since: float
    """``time.monotonic()`` of the last of these: the grant, the request for the KV, the request to give it back."""
    lane: int | None
    """The lane in which its claim waited: see ``WaitingQueue.lane_of``."""
    asked_back: bool = False
    """Whether the sender was asked to give the memory back, and has not answered that it has begun."""


def freed_by(reservations: Iterable[Reservation], pool: KVPool) -> Reserve:
    """Return the memory that becomes free if these reservations are given back. What they share stays."""
    given = NO_RESERVE
    for one in reservations:
        hold = hold_of(one.req)
        slots = pool.pages_up(hold.kv_len - one.req.reused)
        given = given.plus(Reserve(slots, hold.window.committed, rows=1))
    return given


class TransferLimit:
    """The limit on reservations while prompts are computed for peers: rule 1 of ``claims.py``.

    ``reservations``: all of them, by rid.
    """

    def __init__(self, memory: KVMemory, reservations: Mapping[str, Reservation]) -> None:
        self._memory = memory
        self._reservations = reservations
        self._outgoing: dict[str, int] = {}
        """Tokens, in whole pages, of the prompts that are computed for peers, by rid."""

    @property
    def applies(self) -> bool:
        """Whether prompts are computed for peers."""
        return bool(self._outgoing)

    def came(self, req: Req) -> None:
        """Count an admitted outgoing request before its peer asks for KV. Ignore others."""
        if req.route is Route.OUTGOING:
            self._outgoing[req.rid] = self._memory.pool.pages_up(req.prompt_len)

    def ended(self, rid: str) -> None:
        """Note that the request has ended: it no longer counts."""
        self._outgoing.pop(rid, None)

    def allows(self, req: Req, without: Collection[Reservation] = ()) -> bool:
        """Return whether the limit allows a reservation for ``req``. ``without`` count as given back."""
        if not self._outgoing:
            return True
        memory = self._memory
        others = [one for one in self._reservations.values() if not one.begun and one not in without]
        if not others:
            return True
        held = sum(memory.pool.pages_up(hold_of(one.req).kv_len) for one in others)
        slots = held + memory.pool.pages_up(req.known_len) + max(self._outgoing.values())
        is_within = slots <= memory.pool.max_total_tokens and len(others) + 2 <= memory.pool.num_rows
        given = sum(hold_of(one.req).window.committed for one in without)
        return is_within and memory.headroom.could_promise_one_more(req, given)


class Revocations:
    """Counts of how often requests have given their memory back, and the patience that follows from that."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Reservations that each request has given back, by rid."""

    def add(self, rid: str) -> None:
        """Count a reservation that was given back."""
        self.counts[rid] = self.counts.get(rid, 0) + 1

    def forget(self, rid: str) -> None:
        """Forget a request that has ended."""
        self.counts.pop(rid, None)

    def patience(self, rid: str) -> float:
        """Return the request's next ``Reservation.patience``, as a multiple of the least.

        It differs by rid, and doubles with each revocation.
        """
        times = self.counts.get(rid, 0)
        chance: float = xxhash.xxh3_64_intdigest(f"{times} {rid}".encode()) / 2**64
        return (1 + chance) * (1 << min(times, MOST_DOUBLINGS))
