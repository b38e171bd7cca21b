"""Which request gets KV memory next: one queue of claims for every request that needs some.

A request that waits for memory holds a claim. The kinds:

=========  ===========================================================================================================
computing  the prompt is computed here, for a client or for a peer (routes LOCAL and OUTGOING)
incoming   a peer computes the prompt and writes its KV here (route INCOMING)
optional   KV of a request that runs on a peer meanwhile (a move) or has ended there (returned KV)
=========  ===========================================================================================================

All claims are in one order (``waiting.py``): by rank (priority), within a rank retracted requests first, then by fair
share or policy, then by arrival. An eligible claim that does not fit holds up all claims behind it. Skipped are:

- optional claims that do not fit: nobody depends on them;
- claims that are not *eligible*: the last token of a retracted request is under way, a store is about to bring some of
  the KV, or the claim yields (see 2. below). They hold no memory;
- for incoming claims alone: computing claims that wait for a step's compute budget and not for memory. What these need
  is left for them;
- for computing claims alone: incoming claims that the transfer limit (1. below) holds up, which is not lack of memory.

Why nobody waits for ever
-------------------------
Memory is held by (a) requests that compute or decode here: they have what their prompts need, and where outputs need
more, the last in order are retracted, so that the first always comes to its end; (b) transfers that read or write
here: they end, or their connection does; (c) memory that is revocable at once, for prompts computed ahead of their
hand-over and KV offered for return: it is given up when a claim waits; (d) *reservations*: memory of incoming requests
whose sender has not begun.

(a) to (c) come free without anybody else's memory. (d) does not: the sender may itself wait for memory, held by its own
reservations. A cycle of instances that wait for each other has, on each of them, reservations and behind them an
outgoing request: a computing claim that a peer's reservation waits for. Two rules exclude it:

1. *Transfer limit.* While outgoing requests live here, a reservation is granted only if it, all other reservations and
   the largest outgoing request fit into the pool together, or if it is the only one.
2. *Revocation.* The limit can't see an outgoing request that comes later, nor a large local one before it. So a
   reservation that has made no progress for ``STALL_SECONDS`` is asked back if that makes the first computing claim
   fit. The sender gives it back unless it has begun, in which case it belongs to (b). The claim is queued again where
   it was, and yields to the one that it was revoked for until that one has its memory; so do the incoming claims before
   that one.

After the revocation nothing but (a), (b) and (c) is between the first computing claim and its memory. So on every
instance some computing claim always gets memory, hence every outgoing request does, hence every reservation ends. A
reservation of a lower rank is revoked for any claim, since priorities would not hold otherwise; this can't go in
circles, because the rank decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .admission import Admission
from .kv_memory import KVMemory
from .memory_terms import NO_RESERVE, Reserve
from .req import Req, Route
from .waiting import WaitingQueue

STALL_SECONDS = 1.0
"""A reservation whose sender has not begun for so long may be asked back."""
MOST_PASSED = 64
"""Computing claims that wait for compute budget and are passed in one turn: each costs a look at what it needs."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory of an incoming request. ``since``: when its sender was asked for the KV, or last asked to give it back
    (``time.monotonic()``); infinity before. ``begun``: the sender computes or sends, or did so before it was asked.
    """

    req: Req
    begun: bool
    since: float = math.inf


class Claims:
    """The queue; see the module. ``running``: requests that compute here, by name."""

    def __init__(
        self, waiting: WaitingQueue, memory: KVMemory, admission: Admission, running: Mapping[str, Req]
    ) -> None:
        self._waiting = waiting
        self._memory = memory
        self._admission = admission
        self._running = running
        self._reservations: dict[str, Reservation] = {}
        self._prefix_limits: dict[str, int] = {}
        """Of incoming claims: how many tokens may come from the prefix cache."""
        self._optional: set[str] = set()
        self._yields: dict[str, Req] = {}
        self._outgoing: dict[str, int] = {}
        """Tokens, in whole pages, of the requests whose prompts are computed for peers."""
        self.starved: Req | None = None
        """A request that decodes alone and can't get its next page."""

    # --- claims ---

    def came(self, req: Req) -> None:
        """The request was taken in: an outgoing one counts from now on, also before its peer asks for the KV."""
        if req.route is Route.OUTGOING:
            self._outgoing[req.rid] = self._memory.pages_up(req.prompt_len)

    def ended(self, rid: str) -> None:
        """The request is over."""
        self._outgoing.pop(rid, None)

    def add_incoming(self, req: Req, prefix_limit: int, *, optional: bool) -> None:
        """Queue a claim for KV that a peer has or will compute; see ``KVMemory.admit`` for ``prefix_limit``."""
        self._prefix_limits[req.rid] = prefix_limit
        if optional:
            self._optional.add(req.rid)
        self._waiting.add(req)

    def forget(self, rid: str) -> None:
        """The request has neither claim nor reservation any more."""
        self._waiting.remove(rid)
        self._reservations.pop(rid, None)
        self._prefix_limits.pop(rid, None)
        self._optional.discard(rid)
        self._yields.pop(rid, None)

    def eligible(self, now: float) -> Iterator[Req]:
        """Claims that could use memory now, in order. Whoever was returned may be removed before the next is."""
        for req in self._waiting.order():
            if not (req.pending or self._memory.must_wait(req, now) or self._is_yielding(req)):
                yield req

    def computing(self, now: float) -> Iterator[Req]:
        """Computing claims that may be granted, in order, up to the first incoming claim that lacks memory."""
        is_limited = False
        for req in self.eligible(now):
            if req.route is not Route.INCOMING:
                yield req
            elif req.rid in self._optional or is_limited:
                continue
            elif self._is_within_limit(req):
                return
            else:
                is_limited = True

    def first(self, now: float) -> Req | None:
        """The claim that holds up all others, None where none does."""
        is_limited = False
        for req in self.eligible(now):
            if req.route is not Route.INCOMING:
                return req
            if req.rid not in self._optional and not is_limited:
                if self._is_within_limit(req):
                    return req
                is_limited = True
        return None

    def reserve(self, req: Req) -> Reserve:
        """What must stay obtainable when the request is granted memory: slots for the output of those that run, of
        those whose KV is to come, and its own. Nothing where it is alone, which always fits; nor, for a computing
        claim, where nobody runs: peers may wait for what it computes.
        """
        holders = dict.fromkeys(self._running.values())
        if not holders and (req.route is not Route.INCOMING or not self._reservations):
            return NO_RESERVE
        holders |= dict.fromkeys(one.req for one in self._reservations.values())
        return Reserve(self._admission.reserve(holders, req))

    # --- reservations ---

    def grant_incoming(self, now: float) -> list[Req]:
        """Give memory, not verified yet, to the incoming claims that may have it now; returns their requests."""
        granted: list[Req] = []
        if not self._prefix_limits:
            return granted
        passed, left = NO_RESERVE, MOST_PASSED
        is_limited = False
        for req in self.eligible(now):
            if req.route is not Route.INCOMING:
                more = self._memory.needs([req])
                passed = Reserve(passed.slots + more.slots, passed.window_pages + more.window_pages)
                left -= 1
                if not left or passed.slots > self._memory.obtainable:
                    break
            elif req.rid in self._optional:
                if self._grant(req, passed):
                    granted.append(req)
            elif is_limited or not self._is_within_limit(req):
                is_limited = True
            elif self._grant(req, passed):
                granted.append(req)
            else:
                break
        return granted

    def requested(self, req: Req, now: float) -> None:
        """The sender was asked for the KV."""
        self._reservations[req.rid].since = now

    def began(self, rid: str) -> None:
        """The sender computes, or sends: what is reserved comes free without anybody else's memory."""
        if (reservation := self._reservations.get(rid)) is not None:
            reservation.begun = True
            self._yields.pop(rid, None)

    def landed(self, rid: str) -> None:
        """The request runs here now."""
        self._reservations.pop(rid, None)

    def to_revoke(self, now: float) -> list[Req]:
        """Requests whose reservations are to be asked back now: see rule 2. Each is asked once in ``STALL_SECONDS``."""
        stalled = [one for one in self._reservations.values() if not one.begun and now - one.since >= STALL_SECONDS]
        if not stalled:
            return []
        # The last in order first: it has waited least.
        stalled.sort(key=lambda one: (self._waiting.rank(one.req), one.req.times.turn), reverse=True)
        if self.starved is not None:
            return self._revoke_for(self.starved, stalled, [], now)
        before: list[Req] = []
        for req in self.eligible(now):
            if req.rid in self._optional:
                continue
            computes, rank = req.route is not Route.INCOMING, self._waiting.rank(req)
            victims: list[Req] = []
            if computes and self._outgoing:
                victims = self._revoke_for(req, stalled, before, now)
            elif not before:
                lower = [one for one in stalled if self._waiting.rank(one.req) > rank]
                victims = self._revoke_for(req, lower, before, now)
            if victims or computes or not self._outgoing:
                return victims
            before.append(req)
        return []

    def _revoke_for(self, req: Req, stalled: list[Reservation], before: list[Req], now: float) -> list[Req]:
        """Of ``stalled`` those that suffice for ``req`` beside what was asked back for it already, none where all do
        not; they and ``before`` yield to it.
        """
        given = NO_RESERVE
        for one in self._reservations.values():
            if self._yields.get(one.req.rid) is req and now - one.since < STALL_SECONDS:
                given = self._with(given, one)
        victims: list[Reservation] = []
        candidates = iter(stalled)
        while not self._fits(req, given):
            if (victim := next(candidates, None)) is None:
                return []
            given = self._with(given, victim)
            victims.append(victim)
        for one in victims:
            one.since = now
        reqs = [one.req for one in victims]
        if reqs:
            self._yields |= {other.rid: req for other in (*reqs, *before)}
        return reqs

    def _with(self, given: Reserve, one: Reservation) -> Reserve:
        """``given``, and what the reservation would give."""
        hold = self._memory.hold_of(one.req)
        slots = self._memory.pages_up(hold.kv_len - one.req.reused)
        return Reserve(given.slots + slots, given.window_pages + hold.window.committed)

    def revoked(self, req: Req) -> None:
        """The sender has given the reservation back, and its memory is free: the claim is queued again."""
        self._reservations.pop(req.rid, None)
        self._waiting.add(req)

    def _grant(self, req: Req, passed: Reserve) -> bool:
        reserve = self.reserve(req)
        reserve = Reserve(reserve.slots + passed.slots, reserve.window_pages + passed.window_pages)
        if not self._memory.admit(req, reserve, prefix_limit=self._prefix_limits[req.rid], verified=False):
            return False
        self._waiting.remove(req.rid)
        self._reservations[req.rid] = Reservation(req, begun=req.rid in self._optional)
        return True

    def _is_within_limit(self, req: Req) -> bool:
        """Rule 1."""
        if not self._outgoing:
            return True
        held = [self._memory.hold_of(one.req).kv_len for one in self._reservations.values() if not one.begun]
        if not held:
            return True
        largest = max(self._outgoing.values())
        need = self._memory.pages_up(req.known_len)
        slots = sum(map(self._memory.pages_up, held)) + need + largest
        return slots <= self._memory.max_total_tokens and self._memory.could_promise_one_more(req)

    def _fits(self, req: Req, given: Reserve) -> bool:
        if req is self.starved:
            return self._memory.obtainable + given.slots >= self._memory.page_size
        return self._memory.could_admit(req, NO_RESERVE, given)

    def _is_yielding(self, req: Req) -> bool:
        """Whether the claim stands back for another one, which still lacks memory."""
        other = self._yields.get(req.rid)
        if other is None:
            return False
        if other is self.starved or (other.hold is None and other.rid in self._waiting):
            return True
        del self._yields[req.rid]
        return False
