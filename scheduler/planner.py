"""Plans forward passes: which requests compute which tokens next, and where the memory for it comes from.

A step holds one token of every decoding request, and prompt pieces up to a budget of tokens and time
(``step_budget.py``). The pieces belong to started prompts and to waiting ones in the order of ``claims.py``; the policy
says which of the two goes first. A waiting request is admitted when its whole prompt fits in memory beside the
estimated output (``admission.py``). So no admitted one lacks memory for its prompt. When decoding runs out of
slots, the request that is cheapest to recompute is retracted (``retraction.py``). With priorities, a waiting request
may take the memory of running ones that are further below it than ``--priority-scheduling-preemption-threshold``.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator

from ..messages.base import pack_i32
from ..messages.outputs import Phase
from ..messages.worker import ForwardStep
from ..runtime.metrics import Metrics, counter
from .admission import Admission
from .claims import Claims
from .estimates.cost_model import CostModel, StepShape
from .fairness import FairShares, NoShares
from .joint_start import JointStart
from .kv_memory import KVMemory
from .options import SchedulerOptions
from .policies.base import PolicyNeeds
from .policies.make import make_policy
from .prompt_pieces import PromptPieces
from .req import Req, ReqState, hold_of
from .retraction import Retraction
from .role import CurrentRole
from .shared_prompts import MOST_A_TURN, SharedPrompts
from .shortage import MemoryShortage
from .step_budget import StepBudget
from .step_builder import InFlightStep, RowUpdates, StepBuilder, StepEstimate
from .waiting import WaitingQueue


class PlannedStep:
    """A step's message, its record until the result comes, and the prefilling requests that it advances."""

    def __init__(self, message: ForwardStep, in_flight: InFlightStep, prefilled: list[Req]) -> None:
        self.message = message
        self.in_flight = in_flight
        self.prefilled = prefilled


class StepPlanner:
    """Owner of the queues. ``waiting``: no memory yet. ``running``: has memory and computes here.

    ``arriving``: a peer computes its prompt, and it decodes here as soon as its KV has arrived.
    """

    def __init__(
        self, options: SchedulerOptions, memory: KVMemory, device: str, model: CostModel, role: CurrentRole
    ) -> None:
        shares = FairShares() if options.fair_scheduling else NoShares()
        self.waiting = WaitingQueue(
            make_policy(PolicyNeeds(options, memory, model)),
            shares,
            ranks=options.uses_priorities,
            low_first=options.schedule_low_priority_values_first,
        )
        self.shared_prompts = SharedPrompts(memory.pool.page_size, enabled=not options.disable_radix_cache)
        self.running: dict[str, Req] = {}
        self.arriving: dict[str, Req] = {}
        self.budget = StepBudget.of(options, device, model, role)
        self.joint_start = JointStart(self.budget, model)
        admission = Admission(memory, options.schedule_conservativeness)
        self.claims = Claims(self.waiting, memory, admission, self.running)
        threshold = options.priority_scheduling_preemption_threshold
        self.retraction = Retraction(self.waiting, self.running, self.claims, memory, threshold)
        self.shortage = MemoryShortage(self.waiting, self.running, self.claims, memory)
        self._turns = 0
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache by requests that compute the rest of their prompts here."""
        self.asked_tokens = 0
        self.hit_tokens = 0
        """Prompt tokens looked up in the prefix cache, on all routes, and how many were found."""
        self._memory = memory
        self._model = model
        self._rows = RowUpdates(memory)
        self._step_id = 0

    def plan(self, now: float) -> PlannedStep | None:
        """Plan the next step: admit waiting requests, retract others if slots are short. Return None if it is empty."""
        builder = StepBuilder()
        self.retraction.begin_plan()
        self.shortage.begin_plan()
        for req in self.shared_prompts.ready():
            self.waiting.give_back(req)
        if self.waiting.has_ranks:
            self.retraction.preempt(now)
        is_short = self._plan_decodes(builder, now)
        allowance = self.budget.allowance(builder.shape, awaited=is_short or bool(self.arriving))
        allowance.add_copies(self._memory.tiers.copies.new_ms())
        self._memory.tiers.copies.pace.limit_loads(allowance.forward_ms - self._model.estimate(builder.shape))
        pieces = PromptPieces(builder, allowance, self.budget, self._memory)
        self._plan_prompts(pieces, now)
        allowance.add_copies(self._memory.tiers.copies.new_ms())
        prefilled = pieces.prefilled
        self.shortage.planned(now, nothing=not len(builder))
        if not len(builder):
            return None
        self._step_id += 1
        self._memory.pool.newest_step = self._step_id
        estimate_ms = self._model.estimate(builder.shape)
        promise = None
        if prefilled and allowance.is_timed and self.budget.itl is not None:
            promise = self.budget.itl.promise(estimate_ms + allowance.copy_ms, allowance.limit_ms)
        step_estimate = StepEstimate(builder.shape, estimate_ms, promise, allowance.copy_ms)
        message, in_flight = builder.build(self._step_id, now, self._rows.take(), step_estimate)
        if (window_pages := self._memory.pool.windows.take_changes()).size:
            message.window_pages = pack_i32(window_pages)
        # Only now may duplicates be freed: a page that this step still writes must not be given away within it.
        for req in prefilled:
            self._rows.share(req)
        return PlannedStep(message, in_flight, prefilled)

    def start_landed(self, req: Req, now: float) -> None:
        """Start a request after the KV of its first ``computed`` tokens has arrived.

        Usually one more token is known, and the request decodes from now on. A migrated request first computes the
        tokens that were generated since.
        """
        # It was admitted on the peer. If it is retracted, its own count of cached tokens remains.
        req.times.admitted = req.times.arrival
        self._rows.add(req, req.computed)
        self._rows.share(req)
        # No step computes the shared pages, so their copies to the host must precede all later loads from there.
        self._memory.tiers.copies.fence()
        # A decoding request gets the slot of its next token when that is computed; a migrated request may have it
        # already.
        decodes = req.remaining <= 1 and hold_of(req).kv_len == req.computed
        req.state = ReqState.RUNNING if decodes else ReqState.PREFILLING
        req.phases.enter(Phase.DECODE if decodes else Phase.PREFILL, now)
        self.arriving.pop(req.rid, None)
        self.claims.landed(req.rid)
        self.running[req.rid] = req

    def begin(self, req: Req, now: float) -> None:
        """Compute an incoming request's prompt here, as its KV will not come. It keeps the memory for that KV."""
        self.arriving.pop(req.rid, None)
        self.claims.landed(req.rid)
        req.state = ReqState.PREFILLING
        req.phases.enter(Phase.PREFILL, now)
        self.running[req.rid] = req
        req.times.admitted = now
        req.cached_tokens = req.computed
        self.cached_tokens += req.computed
        self.waiting.shares.prompt(req.tenant, req.remaining)
        self._rows.add(req, req.computed)

    def go_on(self, req: Req) -> None:
        """Put a request that ``suspend`` removed into the queue that it was in: running if it has memory, else
        waiting.
        """
        if req.hold is None:
            self.waiting.add(req, req.lane)
        else:
            self.running[req.rid] = req

    def grant_incoming(self, now: float) -> list[Req]:
        """Grant memory to the incoming claims in order, as far as it fits, and return their requests."""
        granted = self.claims.grant_incoming(now)
        self._turns += len(granted)
        return granted

    def take_turns(self) -> int:
        """Return how many waiting requests have got memory since the last call."""
        turns, self._turns = self._turns, 0
        return turns

    def count_lookup(self, req: Req) -> None:
        """Count the prefix lookup of a request that got its first memory; ``computed`` tokens were cached."""
        self.asked_tokens += req.prompt_len
        self.hit_tokens += req.computed

    def came(self, req: Req) -> Req:
        """Count an admitted request, before it is queued, for fair shares and the transfer limit, and return it."""
        self.waiting.shares.comes(req.tenant)
        self.claims.limit.came(req)
        return req

    def ended(self, req: Req) -> None:
        """Remove a request that has ended from all queues and counts, and learn its output length."""
        self.forget(req.rid)
        self.claims.limit.ended(req.rid)
        self.claims.admission.learn(req)
        self.waiting.shares.goes(req.tenant)

    def forget(self, rid: str) -> None:
        """Remove the request from every queue, and drop its claim. Its memory is not freed here."""
        self.claims.forget(rid)
        self.running.pop(rid, None)
        self.arriving.pop(rid, None)

    def suspend(self, req: Req) -> None:
        """Remove the request from every queue for a while, as ``forget`` does, and note the lane of its claim.

        If it is queued again, its tenant has the place that it would have had.
        """
        if req.rid in self.waiting:
            req.lane = self.waiting.lane_of(req)
        elif (reservation := self.claims.reservations.get(req.rid)) is not None:
            req.lane = reservation.lane
        self.forget(req.rid)

    def decodes_now(self) -> StepShape:
        """Return the shape of a step in which each decoding request computes one token, without prompts."""
        decoding = [r for r in self.running.values() if r.state is ReqState.RUNNING]
        return StepShape(len(decoding), sum(r.computed for r in decoding))

    def _plan_decodes(self, builder: StepBuilder, now: float) -> bool:
        """Add one token of each decoding request to the step. Retract requests if slots are short.

        Return whether a request could not continue for lack of memory that hand-overs hold.
        """
        reqs = [r for r in self.running.values() if r.state is ReqState.RUNNING and r.wants_tokens]
        reqs = self._memory.headroom.growable(reqs)
        is_short = False
        while reqs:
            slots = self._memory.grow(reqs)
            if slots is not None:
                builder.add_decodes(reqs, slots)
                return is_short
            victims = self.retraction.candidates(reqs)
            # A lone request fits by construction: what it lacks is held by hand-overs, or by a request with its last
            # token under way. These end by themselves, except hand-overs with a writer that cannot be stopped and does
            # not stop, so the wait has a limit.
            if len(victims) == 1:
                [lone] = reqs
                self.shortage.lacks_slot(lone)
                return True
            victim = self.retraction.choose(victims)
            if victim in reqs:
                reqs.remove(victim)
            # A hand-over that reads the victim's pages keeps them. Retraction would free nothing and cost a recompute,
            # so the victim waits.
            if self._memory.headroom.is_pinned(victim):
                is_short = True
            else:
                self.retraction.retract(victim, now)
        return is_short

    def _plan_prompts(self, pieces: PromptPieces, now: float) -> None:
        waiting = self.waiting
        begun = waiting.policy.begun([r for r in self.running.values() if r.state is ReqState.PREFILLING])
        if not begun and not len(waiting):
            return
        if waiting.has_ranks:
            begun.sort(key=waiting.rank)
        pieces.holds_last = self.joint_start.holds(pieces.allowance, self._alike(begun, now), now)
        self._add_pieces(pieces, begun, now)
        if pieces.holds_last and not pieces.prefilled:
            # No other request can start: there is no memory, or a prefix is loaded first.
            pieces.holds_last = False
            for req in filter(self._is_loaded, begun):
                pieces.go_on(req)
        self.budget.planned(refused=not pieces.prefilled)

    def _alike(self, begun: list[Req], now: float) -> Iterator[Req]:
        """Yield the prompts that may be computed next, in order, up to the first of another priority."""
        prompts = itertools.chain(begun, itertools.islice(self.claims.computing(now), self._memory.pool.free_rows))
        ranked = itertools.groupby(prompts, key=self.waiting.rank)
        return next(ranked, (0, iter(())))[1]

    def _add_pieces(self, pieces: PromptPieces, begun: list[Req], now: float) -> None:
        waiting = self.waiting
        candidates = self._candidates(pieces, begun, now)
        # If waiting requests can't overtake started ones, don't look up the next candidate yet: it costs a tree walk.
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
        """Yield the waiting requests that can start, in the order of grants.

        Set those aside that share a prefix which another request computes now: they start from its KV later.
        """
        if not len(self.waiting) or not pieces.may_begin:
            return
        aside = 0
        for req in self.claims.computing(now):
            ahead = [*begun, *(r for r in pieces.prefilled if r not in begun)]
            # A follower goes at its leader's pace, so the leader must not have a lower priority.
            ahead = [r for r in ahead if self.waiting.rank(r) <= self.waiting.rank(req)]
            if ahead and not req.retractions and self.shared_prompts.follows(req, self._memory.prefix_len(req), ahead):
                self.waiting.set_aside(req)
                aside += 1
                if aside == MOST_A_TURN:
                    return
                continue
            yield req

    def _begin(self, req: Req, candidates: Generator[Req], pieces: PromptPieces, now: float) -> Req | None:
        """Give the request memory and its first piece. Return the next candidate.

        Return None if this one gets no memory, so that no other request overtakes it, or if the allowance is used up.
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
        """Load the prefix from host memory as far as the budget allows, and return whether all of it is loaded."""
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
        if not req.retractions:
            self.waiting.shares.prompt(req.tenant, req.to_compute)
        # A request that was admitted before finds its own tokens; these are no cache hits.
        if not req.times.admitted:
            req.times.admitted = now
            req.cached_tokens = req.computed
            self.cached_tokens += req.computed
            self.count_lookup(req)
        self._rows.add(req, req.computed + req.to_load)


METRICS: Metrics[StepPlanner] = (
    counter(
        "pdserve_prefix_cache_asked_tokens_total",
        "Tokens looked up in the prefix cache.",
        lambda p: p.asked_tokens,
        note="A request is looked up when it gets its memory.",
    ),
    counter(
        "pdserve_prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.", lambda p: p.hit_tokens
    ),
    counter(
        "pdserve_retractions_total",
        "How often a running request lost its memory to others.",
        lambda p: p.retraction.count,
        note="Other servers call it a preemption.",
    ),
    counter(
        "pdserve_preemptions_total",
        "Retractions in favour of a request of higher priority.",
        lambda p: p.retraction.preemptions,
    ),
)
