"""Plans forward passes: which requests compute which tokens next, and where the memory for it comes from.

A step holds one token of every request that decodes, and prompt pieces up to a budget of tokens and time
(``step_budget.py``): pieces of admitted requests first, then waiting requests in the policy's order. A waiting request
is admitted when its whole prompt fits in memory, so an admitted one never stops half-way. When decoding runs out of
slots the youngest running request is retracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ..messages.base import pack_i32
from ..messages.worker import ForwardStep, RowInit, SlotDelta
from ..runtime.options import ServerOptions
from .admission import TokenReserve
from .cost_model import CostModel
from .kv_memory import KVMemory, Reserve
from .policy import POLICIES
from .req import Req, ReqState, Route
from .step_budget import StepBudget, StepRoom
from .step_builder import Foresight, InFlightStep, StepBuilder
from .step_shape import StepShape

MOST_BEFORE = 16
"""How many that came before are counted: far more than get memory in one turn."""


class PlannedStep:
    """A step, what to remember of it, and the prefilling requests that it moved on."""

    def __init__(self, message: ForwardStep, in_flight: InFlightStep, prefilled: list[Req]) -> None:
        self.message = message
        self.in_flight = in_flight
        self.prefilled = prefilled


class Stuck(NamedTuple):
    """``req`` has waited for memory since ``since`` (``time.monotonic()``), and nobody who computes has it."""

    req: Req
    since: float


class StepPlanner:
    """Owner of the queues. ``waiting``: no memory yet. ``running``: holds memory and computes here.

    ``arriving``: a peer computes its prompt, and it decodes here as soon as its KV has landed.
    """

    def __init__(self, options: ServerOptions, memory: KVMemory, device: str, model: CostModel) -> None:
        self.waiting: dict[str, Req] = {}
        self.running: dict[str, Req] = {}
        self.arriving: dict[str, Req] = {}
        self.budget = StepBudget.of(options, device, model)
        self.reserve = TokenReserve(options.schedule_conservativeness)
        self.retractions = 0
        self.cached_tokens = 0
        """Prompt tokens that requests found cached which compute the rest here."""
        self.asked_tokens = 0
        self.hit_tokens = 0
        """What the prefix cache was asked for, by whomever, and what of it was there."""
        self.stuck: Stuck | None = None
        """Who can't go on though nobody else computes."""
        self.retracted: list[Req] = []
        """Who had to give way to the latest plan."""
        self._memory = memory
        self._policy = POLICIES[options.schedule_policy]()
        self._model = model
        self._new_rows: list[RowInit] = []
        self._slot_deltas: list[SlotDelta] = []
        self._step_id = 0

    def plan(self, now: float) -> PlannedStep | None:
        """The next step, None where nothing can be computed now."""
        builder = StepBuilder()
        self.retracted = []
        stuck = self._plan_decodes(builder)
        room = self.budget.room(builder.shape, awaited=stuck or bool(self.arriving))
        prefilled = self._plan_prefills(builder, room, now)
        self._note_stuck(now, nothing=not len(builder))
        if not len(builder):
            return None
        self._step_id += 1
        self._memory.newest_step = self._step_id
        estimate_ms = self._model.estimate(builder.shape)
        promise = None
        if prefilled and room.is_timed and self.budget.itl is not None:
            promise = self.budget.itl.promise(estimate_ms, room.limit_ms)
        foresight = Foresight(builder.shape, estimate_ms, promise)
        message, in_flight = builder.build(self._step_id, now, self._new_rows, self._slot_deltas, foresight)
        window_pages = self._memory.take_window_changes()
        if window_pages is not None:
            message.window_pages = window_pages
        self._new_rows, self._slot_deltas = [], []
        # Only now may duplicates be freed: a page that this step still writes must not be given away within it.
        for req in prefilled:
            self._share(req)
        return PlannedStep(message, in_flight, prefilled)

    def _note_stuck(self, now: float, *, nothing: bool) -> None:
        """A request that is alone, or first in line with none running, lacks memory that only hand-overs can hold."""
        first = None
        if nothing and not self.running:
            first = next((r for r in self.waiting.values() if not r.pending), None)
        elif nothing and len(self.running) == 1:
            lone = next(iter(self.running.values()))
            first = lone if lone.state is ReqState.RUNNING and lone.wants_tokens and not lone.pending else None
        if first is None:
            self.stuck = None
        elif self.stuck is None or self.stuck.req is not first:
            self.stuck = Stuck(first, now)

    def start_landed(self, req: Req) -> None:
        """The KV of an incoming request's first ``computed`` tokens has landed, and what follows is known: one token,
        mostly, and it decodes from now on. A moved request first computes what it has written since.
        """
        # Admitted on the peer; should it be retracted, its own count of cached tokens stands.
        req.times.admitted = req.times.arrival
        self._take_row(req, req.computed)
        self._share(req)
        # Who decodes gets a slot for the token that is computed; a moved request may have it already.
        decodes = req.remaining <= 1 and self._memory.hold_of(req).kv_len == req.computed
        req.state = ReqState.RUNNING if decodes else ReqState.PREFILLING
        self.arriving.pop(req.rid, None)
        self.running[req.rid] = req

    def begin(self, req: Req, now: float) -> None:
        """The request has its memory, for KV that does not come: its prompt is computed here."""
        self.arriving.pop(req.rid, None)
        req.state = ReqState.PREFILLING
        self.running[req.rid] = req
        req.times.admitted = now
        req.cached_tokens = req.computed
        self.cached_tokens += req.computed
        self._take_row(req, req.computed)

    def hold_back(self, req: Req) -> None:
        """Plan nothing more of the request until ``go_on``; it keeps what it has."""
        self.forget(req.rid)

    def go_on(self, req: Req) -> None:
        """It stands where it stood."""
        (self.waiting if req.hold is None else self.running)[req.rid] = req

    def count_lookup(self, req: Req) -> None:
        """The request has just got its memory for the first time, ``computed`` tokens of it from the prefix cache."""
        self.asked_tokens += req.prompt_len
        self.hit_tokens += req.computed

    def forget(self, rid: str) -> None:
        """The request has ended."""
        for queue in (self.waiting, self.running, self.arriving):
            queue.pop(rid, None)

    def decodes_now(self) -> StepShape:
        """What a step of all requests that decode would be."""
        decoding = [r for r in self.running.values() if r.state is ReqState.RUNNING]
        return StepShape(len(decoding), sum(r.computed for r in decoding))

    def room_for(self, req: Req) -> Reserve:
        """What to keep back for running requests' output, and the request's own, when it is admitted; and for those
        that came before it, whose KV is to come from elsewhere.
        """
        output = self.reserve.tokens([*self.running.values(), req]) if self.running else 0
        # Nobody comes before one that was retracted: it has run already, and newcomers wait for it.
        before = Reserve() if req.retractions else self._needed_before(req, self.arriving.values())
        return before._replace(slots=before.slots + output)

    def needed_before(self, req: Req) -> Reserve:
        """What requests need which came before this one and wait to be computed here."""
        return self._needed_before(req, self.waiting.values())

    def _needed_before(self, req: Req, others: Iterable[Req]) -> Reserve:
        # Both kinds take memory as they came: else whichever is tried first would leave the other none.
        earlier = (r for r in others if r.hold is None and r.times.ready and r.times.turn < req.times.turn)
        return self._memory.needs(itertools.islice(earlier, MOST_BEFORE))

    def _plan_decodes(self, builder: StepBuilder) -> bool:
        """Returns whether a request that decodes can't, for want of memory."""
        reqs = [r for r in self.running.values() if r.state is ReqState.RUNNING and r.wants_tokens]
        reqs = self._memory.growable(reqs)
        while reqs:
            slots = self._memory.grow(reqs)
            if slots is not None:
                builder.add_decodes(reqs, slots)
                self.reserve.step_done()
                return False
            # A lone request fits by construction: what it lacks is held by hand-overs. These end by themselves, but for
            # those whose writer can't be stopped and does not stop; so there is a limit to the wait.
            if len(reqs) == 1 and len(self.running) == 1:
                return True
            victim = reqs.pop()
            self._retract(victim)
        return False

    def _retract(self, req: Req) -> None:
        self._memory.finish(req)
        del self.running[req.rid]
        req.state = ReqState.WAITING
        req.route = Route.LOCAL
        req.computed = 0
        req.retractions += 1
        self.retractions += 1
        self.reserve.retracted()
        self.waiting[req.rid] = req
        self.retracted.append(req)

    def _plan_prefills(self, builder: StepBuilder, room: StepRoom, now: float) -> list[Req]:
        prefilled: list[Req] = []
        begun = [r for r in self.running.values() if r.state is ReqState.PREFILLING]
        if begun or self.waiting:
            self._continue(begun, builder, room, prefilled)
            self._begin(builder, room, prefilled, now)
            self.budget.planned(refused=not prefilled)
        return prefilled

    def _continue(self, begun: list[Req], builder: StepBuilder, room: StepRoom, prefilled: list[Req]) -> None:
        for req in begun:
            fits = self.budget.fitting(room, builder.shape, req.computed, req.remaining)
            if fits <= 0 and room.is_timed:
                # Later ones may well be cheaper, deep as this one is in its prompt; they would starve it.
                room.close()
            self._add_chunk(builder, req, room, fits, prefilled)

    def _begin(self, builder: StepBuilder, room: StepRoom, prefilled: list[Req], now: float) -> None:
        if not self.waiting or self.budget.fitting(room, builder.shape, 0, 1) <= 0:
            return
        for req in self._policy.order(self.waiting.values(), self._memory):
            if req.pending:  # retracted while its last token was on its way
                continue
            if self._memory.must_wait(req, now):
                continue
            if not self._memory.admit(req, self.room_for(req), prefix_limit=req.longest_reusable_prefix):
                break
            self._admitted(req, now)
            fits = self.budget.fitting(room, builder.shape, req.computed, req.remaining)
            self._add_chunk(builder, req, room, fits, prefilled)
            if self.budget.fitting(room, builder.shape, 0, 1) <= 0:
                break

    def _admitted(self, req: Req, now: float) -> None:
        del self.waiting[req.rid]
        req.state = ReqState.PREFILLING
        self.running[req.rid] = req
        # What a request finds that had its turn before is its own.
        if not req.times.admitted:
            req.times.admitted = now
            req.cached_tokens = req.computed
            self.cached_tokens += req.computed
            self.count_lookup(req)
        self._take_row(req, req.computed)

    def _take_row(self, req: Req, mapped: int) -> None:
        row = self._memory.hold_of(req).row
        self._new_rows.append(req.row_init(row))
        if mapped:
            self._slot_deltas.append(SlotDelta(row, 0, pack_i32(self._memory.slots(req, 0, mapped))))

    def _add_chunk(self, builder: StepBuilder, req: Req, room: StepRoom, fits: int, prefilled: list[Req]) -> None:
        """Add the request's next piece, of the tokens that fit; none where the step has no room for one."""
        length = req.remaining
        if length > fits:
            if self.budget.may_cut:
                length = self._piece(req, room, fits, bool(prefilled))
            elif prefilled:
                return
        if length <= 0:
            return
        most = self._memory.chunk_room(req, req.computed)
        if most is not None:
            length = min(length, most)
            self._memory.move_window(req, req.computed, req.computed + length)
        slots = self._memory.slots(req, req.computed, req.computed + length)
        builder.add_chunk(req, length, slots)
        room.take(length)
        prefilled.append(req)
        if req.remaining <= 1 and req.pending:
            req.state = ReqState.RUNNING if req.route is not Route.OUTGOING else ReqState.SENDING

    def _piece(self, req: Req, room: StepRoom, fits: int, others: bool) -> int:
        """How much of a prompt to compute now that is longer than what ``fits``.

        A piece ends on a page border, because whole pages can be shared, and pushed to a peer, at once. But a limit of
        time is any number of tokens, often few: there it ends where it must rather than give up more than a quarter.
        And a scrap of less than a page, beside other pieces, is not worth its cost.
        """
        page = self._memory.page_size
        whole_pages = (req.computed + fits) // page * page - req.computed
        if whole_pages >= (fits * 3 / 4 if room.is_timed else 1):
            return whole_pages
        return fits if fits >= page or not others else 0

    def _share(self, req: Req) -> None:
        rewrite = self._memory.share(req, req.computed)
        if rewrite is not None:
            row = self._memory.hold_of(req).row
            self._slot_deltas.append(SlotDelta(row, rewrite.start, pack_i32(rewrite.slots)))
