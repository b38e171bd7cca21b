"""Plans forward passes: which requests compute which tokens next, and where the memory for it comes from.

A step holds one token of every request that decodes, and prompt pieces up to a token budget: pieces of admitted
requests first, then waiting requests in the policy's order. A waiting request is admitted when its whole prompt fits
in memory, so an admitted one never stops half-way. When decoding runs out of slots the youngest running request is
retracted.
"""

from __future__ import annotations

from ..messages.base import pack_i32
from ..messages.worker import ForwardStep, RowInit, SlotDelta
from ..runtime.options import ServerOptions
from .admission import TokenReserve
from .kv_memory import KVMemory
from .policy import POLICIES
from .req import Req, ReqState, Route
from .step_budget import StepBudget
from .step_builder import InFlightStep, StepBuilder


class PlannedStep:
    """A step, what to remember of it, and the prefilling requests that it moved on."""

    def __init__(self, message: ForwardStep, in_flight: InFlightStep, prefilled: list[Req]) -> None:
        self.message = message
        self.in_flight = in_flight
        self.prefilled = prefilled


class StepPlanner:
    """Owner of the queues. ``waiting``: no memory yet. ``running``: holds memory and computes here."""

    def __init__(self, options: ServerOptions, memory: KVMemory, device: str) -> None:
        self.waiting: dict[str, Req] = {}
        self.running: dict[str, Req] = {}
        self.reserve = TokenReserve(options.schedule_conservativeness)
        self.retractions = 0
        self.retracted: list[Req] = []
        """Who had to give way to the latest plan."""
        self._memory = memory
        self._policy = POLICIES[options.schedule_policy]()
        self._budget = StepBudget.of(options, device)
        self._new_rows: list[RowInit] = []
        self._slot_deltas: list[SlotDelta] = []
        self._step_id = 0

    @property
    def last_step_id(self) -> int:
        """Id of the newest planned step."""
        return self._step_id

    def plan(self, now: float) -> PlannedStep | None:
        """The next step, None where nothing can be computed now."""
        builder = StepBuilder()
        self.retracted = []
        self._plan_decodes(builder)
        prefilled = self._plan_prefills(builder, now)
        if not len(builder):
            return None
        self._step_id += 1
        message, in_flight = builder.build(self._step_id, now, self._new_rows, self._slot_deltas)
        self._new_rows, self._slot_deltas = [], []
        # Only now may duplicates be freed: a page that this step still writes must not be given away within it.
        for req in prefilled:
            self._share(req)
        return PlannedStep(message, in_flight, prefilled)

    def start_landed(self, req: Req) -> None:
        """An incoming request's KV has landed and its first token is known: it decodes from now on."""
        req.computed = req.prompt_len
        # Admitted on the peer; should it be retracted, its own count of cached tokens stands.
        req.times.admitted = req.times.arrival
        self._take_row(req, req.prompt_len)
        self._share(req)
        req.state = ReqState.RUNNING
        self.running[req.rid] = req

    def room_for(self, req: Req) -> int:
        """Slots to keep back for running requests' output, and the request's own, when it is admitted."""
        return self.reserve.tokens([*self.running.values(), req]) if self.running else 0

    def _plan_decodes(self, builder: StepBuilder) -> None:
        reqs = [r for r in self.running.values() if r.state is ReqState.RUNNING and r.wants_tokens]
        while reqs:
            slots = self._memory.grow(reqs)
            if slots is not None:
                builder.add_decodes(reqs, slots)
                self.reserve.step_done()
                return
            # A lone request fits by construction: what it lacks is held by hand-overs, which end by themselves.
            if len(reqs) == 1 and len(self.running) == 1:
                return
            victim = reqs.pop()
            self._retract(victim)

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

    def _plan_prefills(self, builder: StepBuilder, now: float) -> list[Req]:
        budget = self._budget.tokens(decoding=len(builder) > 0)
        prefilled: list[Req] = []
        for req in [r for r in self.running.values() if r.state is ReqState.PREFILLING]:
            budget -= self._add_chunk(builder, req, budget, prefilled)
        if not self.waiting or budget <= 0:
            return prefilled
        for req in self._policy.order(self.waiting.values(), self._memory):
            if budget <= 0:
                break
            if req.pending:  # retracted while its last token was on its way
                continue
            if not self._memory.admit(req, self.room_for(req), prefix_limit=req.longest_reusable_prefix):
                break
            self._admitted(req, now)
            budget -= self._add_chunk(builder, req, budget, prefilled)
        return prefilled

    def _admitted(self, req: Req, now: float) -> None:
        del self.waiting[req.rid]
        req.state = ReqState.PREFILLING
        self.running[req.rid] = req
        if not req.times.admitted:
            req.times.admitted = now
            req.cached_tokens = req.computed
        self._take_row(req, req.computed)

    def _take_row(self, req: Req, mapped: int) -> None:
        row = self._memory.hold_of(req).row
        self._new_rows.append(req.row_init(row))
        if mapped:
            self._slot_deltas.append(SlotDelta(row, 0, pack_i32(self._memory.slots(req, 0, mapped))))

    def _add_chunk(self, builder: StepBuilder, req: Req, budget: int, prefilled: list[Req]) -> int:
        """Add the request's next piece; returns its length (0: the budget leaves no room for one)."""
        length = req.remaining
        if length > budget:
            if self._budget.may_cut:
                length = self._piece(req, budget)
            elif prefilled:
                return 0
        if length <= 0:
            return 0
        slots = self._memory.slots(req, req.computed, req.computed + length)
        builder.add_chunk(req, length, slots)
        prefilled.append(req)
        if req.remaining <= 1 and req.pending:
            req.state = ReqState.RUNNING if req.route is not Route.OUTGOING else ReqState.SENDING
        return length

    def _piece(self, req: Req, budget: int) -> int:
        """How much of a prompt that is longer than ``budget`` to compute now.

        A piece ends on a page border, because whole pages can be shared, and pushed to a peer, at once; but where the
        budget of every step is below a page it ends where it must.
        """
        page = self._memory.page_size
        length = (req.computed + budget) // page * page - req.computed
        return length if length > 0 or self._budget.mixed >= page else budget

    def _share(self, req: Req) -> None:
        rewrite = self._memory.share(req, req.computed)
        if rewrite is not None:
            row = self._memory.hold_of(req).row
            self._slot_deltas.append(SlotDelta(row, rewrite.start, pack_i32(rewrite.slots)))
