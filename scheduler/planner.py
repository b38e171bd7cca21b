"""Plans forward passes: which requests compute which tokens next, and where the memory for it comes from.

A step holds one token of every request that decodes, and prompt pieces up to a budget of tokens and time
(``step_budget.py``): of those that are begun, and of waiting ones in the order of ``claims.py``; which of the two goes
first, the policy says. A waiting request is admitted when its whole prompt fits in memory, beside the output that is
foreseen (``admission.py``), so an admitted one never stops half-way. When decoding runs out of slots, the request that
is cheapest to compute again is retracted (``retraction.py``). With priorities, one that waits may take the memory of
running ones that are further below it than ``--priority-scheduling-preemption-threshold``.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import NamedTuple

from ..messages.base import pack_i32
from ..messages.outputs import Phase
from ..messages.worker import ForwardStep, RowInit, SlotDelta
from ..runtime.options import ServerOptions
from .admission import Admission
from .claims import Claims
from .estimates.cost_model import CostModel
from .estimates.step_shape import StepShape
from .fairness import FairShares
from .joint_start import JointStart
from .kv_memory import KVMemory
from .memory_terms import NO_RESERVE
from .policies.registry import make_policy
from .prompt_pieces import PromptPieces
from .req import Req, ReqState, Route
from .retraction import choose_victim
from .shared_prompts import MOST_A_TURN, SharedPrompts
from .step_budget import StepBudget
from .step_builder import Foresight, InFlightStep, StepBuilder
from .waiting import WaitingQueue


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
        shares = FairShares() if options.fair_scheduling else None
        self.waiting = WaitingQueue(
            make_policy(options, memory, model),
            shares,
            ranks=options.uses_priorities,
            low_first=options.schedule_low_priority_values_first,
        )
        memory.on_stored = self.waiting.stored
        self.shared_prompts = SharedPrompts(memory.page_size, enabled=not options.disable_radix_cache)
        self.running: dict[str, Req] = {}
        self.arriving: dict[str, Req] = {}
        self.budget = StepBudget.of(options, device, model)
        self.joint_start = JointStart(self.budget, model)
        self.admission = Admission(memory, options.schedule_conservativeness)
        self.claims = Claims(self.waiting, memory, self.admission, self.running)
        self.retractions = 0
        self.preemptions = 0
        self._turns = 0
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
        self._threshold = options.priority_scheduling_preemption_threshold
        self._model = model
        self._new_rows: list[RowInit] = []
        self._slot_deltas: list[SlotDelta] = []
        self._step_id = 0

    def plan(self, now: float) -> PlannedStep | None:
        """The next step, None where nothing can be computed now."""
        builder = StepBuilder()
        self.retracted = []
        for req in self.shared_prompts.ready():
            self.waiting.give_back(req)
        if self.waiting.has_ranks:
            self._preempt(now)
        stuck = self._plan_decodes(builder, now)
        room = self.budget.room(builder.shape, awaited=stuck or bool(self.arriving))
        room.add_copies(self._memory.copy_ms())
        self._memory.limit_loads(room.forward_ms - self._model.estimate(builder.shape))
        pieces = PromptPieces(builder, room, self.budget, self._memory)
        self._plan_prompts(pieces, now)
        room.add_copies(self._memory.copy_ms())
        prefilled = pieces.prefilled
        self._note_stuck(now, nothing=not len(builder))
        if not len(builder):
            return None
        self._step_id += 1
        self._memory.newest_step = self._step_id
        estimate_ms = self._model.estimate(builder.shape)
        promise = None
        if prefilled and room.is_timed and self.budget.itl is not None:
            promise = self.budget.itl.promise(estimate_ms + room.copy_ms, room.limit_ms)
        foresight = Foresight(builder.shape, estimate_ms, promise, room.copy_ms)
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
            first = next(self.claims.eligible(now, computing_only=True), None)
        elif nothing and len(self.running) == 1:
            lone = next(iter(self.running.values()))
            first = lone if lone.state is ReqState.RUNNING and lone.wants_tokens and not lone.pending else None
        self.claims.starved = first if first is not None and first.rid in self.running else None
        if first is None:
            self.stuck = None
        elif self.stuck is None or self.stuck.req is not first:
            self.stuck = Stuck(first, now)

    def start_landed(self, req: Req, now: float) -> None:
        """The KV of an incoming request's first ``computed`` tokens has landed, and what follows is known: one token,
        mostly, and it decodes from now on. A moved request first computes what it has written since.
        """
        # Admitted on the peer; should it be retracted, its own count of cached tokens stands.
        req.times.admitted = req.times.arrival
        self._take_row(req, req.computed)
        self._share(req)
        # No step computes what was shared: its copies to the host go before whatever is loaded from there from now on.
        self._memory.fence()
        # Who decodes gets a slot for the token that is computed; a moved request may have it already.
        decodes = req.remaining <= 1 and self._memory.hold_of(req).kv_len == req.computed
        req.state = ReqState.RUNNING if decodes else ReqState.PREFILLING
        req.phases.enter(Phase.DECODE if decodes else Phase.PREFILL, now)
        self.arriving.pop(req.rid, None)
        self.claims.landed(req.rid)
        self.running[req.rid] = req

    def begin(self, req: Req, now: float) -> None:
        """The request has its memory, for KV that does not come: its prompt is computed here."""
        self.arriving.pop(req.rid, None)
        self.claims.landed(req.rid)
        req.state = ReqState.PREFILLING
        req.phases.enter(Phase.PREFILL, now)
        self.running[req.rid] = req
        req.times.admitted = now
        req.cached_tokens = req.computed
        self.cached_tokens += req.computed
        if self.waiting.shares is not None:
            self.waiting.shares.prompt(req.tenant, req.remaining)
        self._take_row(req, req.computed)

    def hold_back(self, req: Req) -> None:
        """Plan nothing more of the request until ``go_on``; it keeps what it has."""
        self.forget(req.rid)

    def go_on(self, req: Req) -> None:
        """It stands where it stood."""
        if req.hold is None:
            self.waiting.add(req)
        else:
            self.running[req.rid] = req

    def grant_incoming(self, now: float) -> list[Req]:
        """Give memory for the KV that peers have or compute, to the claims whose turn it is; returns their requests."""
        granted = self.claims.grant_incoming(now)
        self._turns += len(granted)
        return granted

    def take_turns(self) -> int:
        """How many that waited have got memory since this was last asked."""
        turns, self._turns = self._turns, 0
        return turns

    def count_lookup(self, req: Req) -> None:
        """The request has just got its memory for the first time, ``computed`` tokens of it from the prefix cache."""
        self.asked_tokens += req.prompt_len
        self.hit_tokens += req.computed

    def came(self, req: Req) -> Req:
        """The request is about to be taken in, whichever way it goes; returns it."""
        if self.waiting.shares is not None:
            self.waiting.shares.comes(req.tenant)
        self.claims.came(req)
        return req

    def ended(self, req: Req) -> None:
        """It is over."""
        self.forget(req.rid)
        self.claims.ended(req.rid)
        self.admission.learn(req)
        if self.waiting.shares is not None:
            self.waiting.shares.goes(req.tenant)

    def forget(self, rid: str) -> None:
        """The request is in no queue any more."""
        self.claims.forget(rid)
        self.running.pop(rid, None)
        self.arriving.pop(rid, None)

    def lacks_memory(self, now: float) -> bool:
        """Whether a request has been waiting for some since before this turn, as far as one can tell."""
        return self.stuck is not None or any(0 < r.times.ready < now for r in self.waiting.values())

    def decodes_now(self) -> StepShape:
        """What a step of all requests that decode would be."""
        decoding = [r for r in self.running.values() if r.state is ReqState.RUNNING]
        return StepShape(len(decoding), sum(r.computed for r in decoding))

    def _plan_decodes(self, builder: StepBuilder, now: float) -> bool:
        """Returns whether a request that decodes can't, for want of memory."""
        reqs = [r for r in self.running.values() if r.state is ReqState.RUNNING and r.wants_tokens]
        reqs = self._memory.growable(reqs)
        is_short = False
        while reqs:
            slots = self._memory.grow(reqs)
            if slots is not None:
                builder.add_decodes(reqs, slots)
                return is_short
            # A lone request fits by construction: what it lacks is held by hand-overs. These end by themselves, but for
            # those whose writer can't be stopped and does not stop; so there is a limit to the wait.
            if len(reqs) == 1 and (is_short or len(self.running) == 1):
                return True
            victim = choose_victim(reqs, self._memory, self.waiting.rank)
            reqs.remove(victim)
            # A hand-over that reads the victim's pages keeps them: it would compute again for nothing, so it waits.
            if self._memory.is_pinned(victim):
                is_short = True
            else:
                self._retract(victim, now)
        return is_short

    def _preempt(self, now: float) -> None:
        """Make room for the first that waits, where those that run are far enough below it and have enough."""
        # Who waits for a store can't begin: the victims would have it back at once, and give it up again.
        if (req := self.claims.first(now)) is None:
            return
        rank, reserve = self.waiting.rank(req), self.claims.reserve(req)
        below = [
            r
            for r in self.running.values()
            if r.state is ReqState.RUNNING
            and self.waiting.rank(r) - rank > self._threshold
            and not self._memory.is_pinned(r)
        ]
        if not below or not self._memory.could_admit(req, NO_RESERVE, self._memory.gives(below)):
            return
        while below and not self._memory.could_admit(req, reserve):
            victim = choose_victim(below, self._memory, self.waiting.rank)
            below.remove(victim)
            self.preemptions += 1
            self._retract(victim, now)
            reserve = self.claims.reserve(req)

    def _retract(self, req: Req, now: float) -> None:
        self._memory.give_way(req)
        del self.running[req.rid]
        req.state = ReqState.WAITING
        req.phases.enter(Phase.QUEUE, now)
        req.route = Route.LOCAL
        req.computed = 0
        req.retractions += 1
        self.retractions += 1
        self.waiting.add(req)
        self.retracted.append(req)

    def _plan_prompts(self, pieces: PromptPieces, now: float) -> None:
        waiting = self.waiting
        begun = waiting.policy.begun([r for r in self.running.values() if r.state is ReqState.PREFILLING])
        if not begun and not len(waiting):
            return
        if waiting.has_ranks:
            begun.sort(key=waiting.rank)
        pieces.holds_last = self.joint_start.holds(pieces.room, self._alike(begun, now), now)
        self._add_pieces(pieces, begun, now)
        if pieces.holds_last and not pieces.prefilled:
            # Nobody else can begin: there is no memory, or a prefix is loaded first.
            pieces.holds_last = False
            for req in filter(self._is_loaded, begun):
                pieces.go_on(req)
        self.budget.planned(refused=not pieces.prefilled)

    def _alike(self, begun: list[Req], now: float) -> Iterator[Req]:
        """Prompts that may be computed next, in order: those of the first one's rank."""
        prompts = itertools.chain(begun, itertools.islice(self.claims.computing(now), self._memory.free_rows))
        ranked = itertools.groupby(prompts, key=self.waiting.rank)
        return next(ranked, (0, iter(())))[1]

    def _add_pieces(self, pieces: PromptPieces, begun: list[Req], now: float) -> None:
        waiting = self.waiting
        candidates = self._candidates(pieces, begun, now)
        # Where nobody that waits passes one that is begun, who is next need not be known before.
        newcomer = next(candidates, None) if begun and (waiting.has_ranks or waiting.policy.may_pass) else None
        for req in begun:
            while newcomer is not None and pieces.may_begin and waiting.is_before(newcomer, req):
                newcomer = self._begin(newcomer, candidates, pieces, now)
            if self._is_loaded(req):
                pieces.go_on(req)
        newcomer = newcomer or next(candidates, None)
        while newcomer is not None and pieces.may_begin:
            newcomer = self._begin(newcomer, candidates, pieces, now)

    def _candidates(self, pieces: PromptPieces, begun: list[Req], now: float) -> Generator[Req]:
        """Those that wait and can begin; who waits for another's prompt is set aside."""
        if not len(self.waiting) or not pieces.may_begin:
            return
        aside = 0
        for req in self.claims.computing(now):
            ahead = [*begun, *(r for r in pieces.prefilled if r not in begun)]
            # Who follows goes at the leader's pace: not at that of one of lower priority.
            ahead = [r for r in ahead if self.waiting.rank(r) <= self.waiting.rank(req)]
            if ahead and not req.retractions and self.shared_prompts.follows(req, self._memory.prefix_len(req), ahead):
                self.waiting.set_aside(req)
                aside += 1
                if aside == MOST_A_TURN:
                    return
                continue
            yield req

    def _begin(self, req: Req, candidates: Generator[Req], pieces: PromptPieces, now: float) -> Req | None:
        """Give the request memory and its first piece. Returns the next one, None where there is no memory for this
        one: nobody passes it then.
        """
        if not self._memory.admit(req, self.claims.reserve(req), prefix_limit=req.longest_reusable_prefix):
            candidates.close()
            return None
        self._admitted(req, now)
        if not pieces.begin(req):
            candidates.close()
            return None
        return next(candidates, None) if pieces.may_begin else None

    def _is_loaded(self, req: Req) -> bool:
        """Load what there is room for, where host memory has more of the request. Returns whether that was all."""
        if req.loading is None:
            return True
        is_hit, came = req.loading.is_hit, self._memory.load_more(req)
        if is_hit:
            req.cached_tokens += came
            self.cached_tokens += came
            self.hit_tokens += came
        return req.loading is None

    def _admitted(self, req: Req, now: float) -> None:
        self.waiting.remove(req.rid)
        req.state = ReqState.PREFILLING
        req.phases.enter(Phase.PREFILL, now)
        self.running[req.rid] = req
        self._turns += 1
        if self.waiting.shares is not None and not req.retractions:
            self.waiting.shares.prompt(req.tenant, req.to_compute)
        # What a request finds that had its turn before is its own.
        if not req.times.admitted:
            req.times.admitted = now
            req.cached_tokens = req.computed
            self.cached_tokens += req.computed
            self.count_lookup(req)
        self._take_row(req, req.computed + req.to_load)

    def _take_row(self, req: Req, mapped: int) -> None:
        row = self._memory.hold_of(req).row
        self._new_rows.append(req.row_init(row))
        if mapped:
            self._slot_deltas.append(SlotDelta(row, 0, pack_i32(self._memory.slots(req, 0, mapped))))

    def _share(self, req: Req) -> None:
        rewrite = self._memory.share(req, req.computed)
        if rewrite is not None:
            row = self._memory.hold_of(req).row
            self._slot_deltas.append(SlotDelta(row, rewrite.start, pack_i32(rewrite.slots)))
