"""The claims on KV memory: one queue, in the order of grants, for every request that needs some.

A request that waits for memory holds a claim. The kinds:

=========  ===========================================================================================================
computing  the prompt is computed here, for a client or for a peer (routes LOCAL and OUTGOING)
incoming   a peer computes the prompt and writes its KV here (route INCOMING)
optional   KV of a request that runs on a peer meanwhile (migration) or has ended there (KV return)
=========  ===========================================================================================================

All claims are in one order (``waiting.py``): by rank (priority), within a rank retracted requests first, then by fair
share or policy, then by arrival. An eligible claim that does not fit holds up all claims after it. Skipped are:

- optional claims that do not fit: no request depends on them. Only the first few by rank and arrival are in the order
  (``optional_claims.py``);
- claims that are not *eligible*, which hold no memory. A retracted request's last token may be under way, a store may
  be about to bring KV, or the claim yields (rule 2);
- for incoming claims only: computing claims that wait for a step's compute budget and not for memory. An incoming claim
  gets memory only if they all fit beside it, with what is reserved for outputs. A prefix in use that they share is
  counted once for all of them;
- for computing claims only: incoming claims that the transfer limit (rule 1 below) holds up, which is not lack of
  memory. While memory is held (rule 3), all incoming ones are skipped.

Why no claim waits for ever
---------------------------
Memory is held by:

- (a) requests that compute or decode here. They have what their prompts need. Where outputs need more, the last
  requests in order are retracted, so the first one always comes to its end;
- (b) transfers that read or write here: they end, or their connection does. Memory of optional claims counts as such.
  Its sender has the KV, needs no memory to send it, and has a time limit;
- (c) memory of prompts computed ahead of their hand-over and of KV offered for return. It can be revoked at once, and
  is given up when the first claim lacks memory;
- (d) *reservations*: memory of incoming requests with a sender that has not begun.

Memory of (a) to (c) is freed without needing memory elsewhere. Memory of (d) is not: the sender may itself wait for
memory, held by its own reservations. In a cycle of instances that wait for each other, each has reservations and,
behind these, an outgoing request. This is a computing claim that a peer's reservation waits for. Three rules exclude
such a cycle:

1. *Transfer limit.* It applies while outgoing requests live here. A reservation is granted only if it, all other
   reservations and the largest outgoing request fit together. That is checked for slots, request rows and window pages.
   The limit does not apply to a reservation that is the only one.
2. *Revocation.* The limit can't see an outgoing request that comes later, nor a large local one ahead of it. So a
   reservation that has made no progress for its ``patience`` is asked back if that makes the first computing claim fit.
   The last in the queue's order are asked back first. One of higher rank than that claim is asked back only while
   outgoing requests live here: no peer waits for a local claim.
   The sender gives it back unless it has begun, in which case it belongs to (b). The revoked claim is queued again
   where it was, and yields to the claim it was revoked for until that one has its memory.
3. *Hold.* After a revocation, other incoming claims get only memory that leaves room for the computing claim. They do
   not stop it, either, though they come before it and do not fit. The same holds if a reservation is stalled, nothing
   computes here and the first computing claim fits already. Claims before it may lack memory that is kept for the
   outputs of reservations.

After the revocation only (a), (b) and (c) are between the first computing claim and its memory. So on every instance
some computing claim always gets memory, hence every outgoing request does, hence every reservation ends.

A claim may be revoked for one of lower rank, and be held up by it. So that it does not starve with that one, both ends:

- yield and hold, if that one is not the first computing claim any more. It may be overtaken, parked or wait for a
  store. Then reservations are asked back for the new first one;
- the yield, if an incoming claim of higher rank than that one gets memory;
- the hold after ``STALL_SECONDS``, unless that one fits. Then it waits only for requests that run here.

This brings no circle back. Where instances agree on ranks, all claims of a circle have the same rank. The reason is
that a claim waits for claims before it, or for reservations of at least its own rank. Say no more requests come, and
look at the highest rank that waits. No incoming claim of a higher rank gets memory. A computing claim that becomes the
first one gets memory, or is overtaken by one that does, and their number is finite. So the yields to the last one end
only with its memory. Then the same holds for the next rank.

Instances that ask each other at once would all give back, and none would gain. So a sender may refuse, as if it had
begun. It refuses if it asks reservations back itself for the prompt of that reservation, and its epoch is smaller than
the asking instance's. In a circle not every epoch is smaller than the next one, so one instance gives back. An instance
that refuses does begin. What it asked for is given back, comes to its end, or is refused in turn. The refusing instance
has a smaller epoch still, and the argument holds for it as well. The patience differs by request, so that few ask at
once. It doubles each time that a request gives memory back, which ends the wait of a request that others revoke again
and again.

A reservation of a lower rank is revoked for any claim after ``STALL_SECONDS``, since priorities would not hold
otherwise. This can't go in circles, because the rank decides. For an incoming claim no others are revoked. So a claim
for a prompt of an idle peer waits behind reservations of a slow one. That peer begins, or the time limits of hand-overs
end its rooms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from .admission import NONE_BEFORE, Admission
from .kv_headroom import PrefixesInUse
from .kv_memory import KVMemory
from .memory_terms import NO_RESERVE, Reserve
from .optional_claims import MOST_OPTIONAL, OptionalClaims
from .req import Req, Route
from .reservations import Reservation, Revocations, TransferLimit, freed_by
from .store_waits import StoreWaits
from .waiting import WaitingQueue

STALL_SECONDS = 1.0
"""Minimum age in seconds of a reservation that is asked back because its sender has not begun."""
MOST_PASSED = 64
"""Computing claims, waiting for compute budget, that incoming claims may overtake in one tick.

The output of each is estimated for every incoming claim that is tried.
"""


class Claims:
    """Queue of all claims; see the module. ``running``: requests that compute here, by rid."""

    def __init__(
        self, waiting: WaitingQueue, memory: KVMemory, admission: Admission, running: Mapping[str, Req]
    ) -> None:
        self._waiting = waiting
        self._memory = memory
        self.admission = admission
        self._running = running
        self.reservations: dict[str, Reservation] = {}
        """Memory of incoming requests, by rid, until their KV has arrived."""
        self._prefix_limits: dict[str, int] = {}
        """How many tokens of an incoming claim may come from the prefix cache, by rid."""
        self._optional = OptionalClaims(waiting)
        self._store_waits = StoreWaits(waiting, memory.tiers.store)
        self._yields: dict[str, Req] = {}
        """The request that needs the memory of a reservation which was asked back, by the rid of the reservation."""
        self._held_for: Req | None = None
        """The computing request for which memory is kept before all incoming claims."""
        self._held_until = -math.inf
        self._revocations = Revocations()
        self.limit = TransferLimit(memory, self.reservations)
        self.starved: Req | None = None
        """A request that decodes alone and cannot get its next page."""

    # --- claims ---

    def add_incoming(self, req: Req, prefix_limit: int, *, optional: bool) -> None:
        """Queue a claim for memory for KV that a peer has or will compute.

        ``prefix_limit``: maximum tokens from the local prefix cache. ``optional``: skip it while it does not fit.
        """
        self._prefix_limits[req.rid] = prefix_limit
        self._waiting.add(req)
        if optional:
            self._optional.add(req)

    def forget(self, rid: str) -> None:
        """Drop the request's claim, its reservation and its count of revocations. Its memory is not freed here."""
        self._waiting.remove(rid)
        self.reservations.pop(rid, None)
        self._prefix_limits.pop(rid, None)
        self._optional.remove(rid)
        self._yields.pop(rid, None)
        self._revocations.forget(rid)

    def eligible(self, now: float, *, computing_only: bool = False) -> Iterator[Req]:
        """Yield the claims that could use memory at ``now``, in the order of grants, found as they are drawn.

        ``computing_only``: leave incoming claims out. A drawn claim may be removed before the next is drawn.
        """
        self._end_yields(now)
        yield from self._could_use_memory(now, computing_only=computing_only or self._is_held(now))

    def _could_use_memory(self, now: float, *, computing_only: bool = False) -> Iterator[Req]:
        self._store_waits.end(now)
        for req in self._waiting.order(computing_only=computing_only):
            if not (req.pending or self._store_waits.holds(req, now) or self._is_yielding(req)):
                yield req

    def _first_computing(self, now: float) -> Req | None:
        return next(self._could_use_memory(now, computing_only=True), None)

    def computing(self, now: float) -> Iterator[Req]:
        """Yield the requests to compute here that may be granted memory at ``now``, in the order of grants.

        Stop at an incoming claim that is not optional. If the transfer limit holds that one up, skip all incoming.
        """
        before: set[Req] = set()
        for req in self.eligible(now):
            if req.route is not Route.INCOMING:
                before.add(req)
                yield req
            elif req.rid not in self._optional:
                if self.limit.allows(req):
                    return
                break
        else:
            return
        # Thousands of incoming claims may wait for the limit: checking each would cost more than a step.
        yield from (req for req in self.eligible(now, computing_only=True) if req not in before)

    def first(self, now: float) -> Req | None:
        """Return the request that is next to be granted memory, or None. Nothing is granted.

        Optional claims are left out, and so are incoming ones if the transfer limit holds up the first.
        """
        req = self._first_needed(now)
        if req is None or req.route is not Route.INCOMING or self.limit.allows(req):
            return req
        return next(self.eligible(now, computing_only=True), None)

    def _first_needed(self, now: float) -> Req | None:
        """Return the first eligible request with a claim that is not optional."""
        return next((req for req in self.eligible(now) if req.rid not in self._optional), None)

    def reserve(
        self,
        req: Req,
        without: Collection[Reservation] = (),
        before: Mapping[Req, int] = NONE_BEFORE,
        victims: Collection[Req] = (),
    ) -> Reserve:
        """Return what must stay obtainable when ``req`` gets memory: slots for its and others' further output.

        That is nothing if ``req`` is alone, as it always fits. Nor is anything reserved if it computes and none runs
        here: peers may wait for it. ``without``: reservations that count as given back. ``before``: claims that are to
        fit as well, with the tokens of a prefix that take no memory. ``victims``: running requests that count as
        retracted.
        """
        holders = dict.fromkeys(one for one in self._running.values() if one not in victims)
        reserved = [one.req for one in self.reservations.values() if one not in without]
        if not (holders or before) and (req.route is not Route.INCOMING or not reserved):
            return NO_RESERVE
        given = self._memory.headroom.gives(victims).slots
        output = self.admission.reserve(holders | dict.fromkeys(reserved), req, before, given=given)
        return Reserve(output).plus(self._memory.headroom.needs(before))

    # --- reservations ---

    def grant_incoming(self, now: float) -> list[Req]:
        """Grant memory to the incoming claims in order, as far as it fits, and return their requests.

        None gets any while ``starved`` is set. Their KV is not shared with other requests before it was checked.
        """
        granted: list[Req] = []
        # Memory that comes free is for a starved request, which has no claim.
        if self.starved is not None or self._waiting.num_computing == len(self._waiting):
            return granted
        while True:
            more = list(self._grant_in_order(now))
            granted += more
            # If all optional claims in the order were granted, those that move up may fit, too.
            if sum(self._optional.remove(req.rid) for req in more) < MOST_OPTIONAL:
                return granted

    def _grant_in_order(self, now: float) -> Iterator[Req]:
        """Grant the incoming claims in order, as far as computing ones before them still fit. Yield their requests."""
        self._end_yields(now)
        passed: dict[Req, int] = {}
        in_use, slots = PrefixesInUse(self._memory.pool), 0
        if self._held_for is not None and self._is_held(now):
            passed[self._held_for] = in_use.add(self._held_for)
        for req in self._could_use_memory(now):
            if req is self._held_for:
                continue
            if req.route is not Route.INCOMING:
                passed[req] = in_use.add(req)
                slots += self._memory.pool.pages_up(req.known_len) - passed[req]
                if len(passed) == MOST_PASSED or slots > self._memory.pool.obtainable:
                    break
            elif req.rid in self._optional:
                if self._grant(req, passed, now):
                    yield req
            elif self.limit.allows(req) and self._grant(req, passed, now):
                yield req
            else:
                break

    def requested(self, req: Req, now: float) -> None:
        """Note that a reservation's sender was asked for KV, which restarts the wait before it may be revoked."""
        self.reservations[req.rid].since = now

    def began(self, rid: str) -> None:
        """Note that the sender computes or sends, so that the reservation, if any, is not asked back any more."""
        if (reservation := self.reservations.get(rid)) is not None:
            reservation.begun, reservation.asked_back = True, False
            self._yields.pop(rid, None)

    def is_asked_back(self, rid: str) -> bool:
        """Return whether a request to give this reservation back is unanswered."""
        reservation = self.reservations.get(rid)
        return reservation is not None and reservation.asked_back

    def asks_for(self, req: Req) -> bool:
        """Return whether reservations were asked back for this request and some have not answered."""
        return any(one.asked_back and self._yields.get(rid) is req for rid, one in self.reservations.items())

    def landed(self, rid: str) -> None:
        """Drop the reservation of ``rid``: its KV has arrived, and the request itself has the memory from now on."""
        self.reservations.pop(rid, None)

    def to_revoke(self, now: float) -> list[Req]:
        """Choose the reservations that a waiting claim needs back (rule 2 of the module), and return their requests.

        They count as asked back until their senders answer. Asking the senders is left to the caller.
        """
        stalled = [
            one
            for one in self.reservations.values()
            if not (one.begun or one.asked_back) and now - one.since >= STALL_SECONDS
        ]
        if not stalled:
            return []
        if self.starved is not None:
            return self._revoke_for(self.starved, stalled, now)
        first = self._first_needed(now)
        if first is None:
            return []
        if first.route is Route.INCOMING:
            rank = self._waiting.rank(first)
            below = [one for one in stalled if self._waiting.rank(one.req) > rank]
            if victims := self._revoke_for(first, below, now):
                return victims
        claim = self._first_computing(now)
        if claim is None:
            return []
        rank = self._waiting.rank(claim)
        victims = self._revoke_for(claim, [one for one in stalled if self._may_revoke(one, rank, now)], now)
        if victims or (not self._running and self._memory.headroom.could_admit(claim, NO_RESERVE)):
            self._held_for, self._held_until = claim, now + STALL_SECONDS
        return victims

    def _revoke_for(self, req: Req, stalled: list[Reservation], now: float) -> list[Req]:
        """Choose ``stalled`` reservations to ask back so that ``req`` fits; [] if it fits or all do not suffice.

        What was asked back for ``req`` lately counts as free. The chosen ones yield to ``req`` from now on.
        """
        gone = [
            one
            for one in self.reservations.values()
            if one.asked_back and self._yields.get(one.req.rid) is req and now - one.since < STALL_SECONDS
        ]
        if self._fits(req, gone) or not self._fits(req, [*gone, *stalled]):
            return []
        # The last in order has waited least. Only now are they sorted: that looks at the prompt of each.
        candidates = self._waiting.as_if_queued({one.req: one.lane for one in stalled})
        victims: list[Reservation] = []
        while not self._fits(req, [*gone, *victims]):
            victims.append(self.reservations[candidates.pop().rid])
        for one in victims:
            one.since, one.asked_back = now, True
            self._yields[one.req.rid] = req
        return [one.req for one in victims]

    def _may_revoke(self, one: Reservation, rank: int, now: float) -> bool:
        """Return whether a computing claim of this ``rank`` may have ``one``, which is stalled, asked back."""
        other = self._waiting.rank(one.req)
        return other > rank or (now - one.since >= one.patience and (other == rank or self.limit.applies))

    def revoked(self, req: Req) -> None:
        """Queue the claim again after its reservation was given back. The caller has freed the memory."""
        reservation = self.reservations.pop(req.rid)
        self._revocations.add(req.rid)
        self._waiting.add(req, reservation.lane)

    def _grant(self, req: Req, passed: Mapping[Req, int], now: float) -> bool:
        """Give an incoming claim memory if all claims in ``passed`` still fit beside it. Return whether it got some."""
        reserve = self.reserve(req, before=passed)
        if not self._memory.admit(req, reserve, prefix_limit=self._prefix_limits[req.rid], verified=False):
            return False
        lane, rank = self._waiting.lane_of(req), self._waiting.rank(req)
        self._keep_yields(lambda other: self._waiting.rank(other) <= rank)
        self._waiting.remove(req.rid)
        patience = STALL_SECONDS * self._revocations.patience(req.rid)
        self.reservations[req.rid] = Reservation(req, req.rid in self._optional, patience, now, lane)
        return True

    def _fits(self, req: Req, gone: Collection[Reservation]) -> bool:
        """Return whether the request could have memory if the reservations ``gone`` were given back."""
        memory, given = self._memory, freed_by(gone, self._memory.pool)
        if req is self.starved:
            return memory.pool.obtainable + given.slots >= memory.pool.page_size
        if req.route is not Route.INCOMING:
            return memory.headroom.could_admit(req, NO_RESERVE, given)
        return self.limit.allows(req, gone) and memory.headroom.could_admit(req, self.reserve(req, gone), given)

    def _is_yielding(self, req: Req) -> bool:
        """Return whether a revoked claim must wait for the one it was revoked for."""
        other = self._yields.get(req.rid)
        return other is not None and (other is self.starved or self._lacks_memory(other))

    def _end_yields(self, now: float) -> None:
        """End all yields to computing claims but the first one, and to requests that have their memory."""
        if self._yields:
            served = (self._first_computing(now), self.starved)
            self._keep_yields(
                lambda other: other in served or (other.route is Route.INCOMING and self._lacks_memory(other))
            )

    def _keep_yields(self, is_kept: Callable[[Req], bool]) -> None:
        """End the yields to requests for which ``is_kept`` returns False, except while the memory is not given back."""
        self._yields = {rid: other for rid, other in self._yields.items() if rid in self.reservations or is_kept(other)}

    def _is_held(self, now: float) -> bool:
        """Return whether memory is kept for a computing claim before all incoming ones. If not, forget that claim."""
        claim = self._held_for
        if claim is None:
            return False
        is_near = now < self._held_until or self._memory.headroom.could_admit(claim, NO_RESERVE)
        if is_near and claim is self._first_computing(now):
            return True
        self._held_for = None
        return False

    def _lacks_memory(self, req: Req) -> bool:
        return req.hold is None and self._waiting.has(req)
