"""The scheduler: admits requests, keeps the worker busy, sends tokens out, and knows the state of every request.

One loop serves all routes (docs/architecture.md). ``process.py`` feeds it messages and time; it answers through its
``Outbox``. In order:

1. ``arrivals`` checks a request and queues it, or hands it to the KV manager when a peer is involved.
2. ``run_steps`` plans and sends forward passes while fewer than ``max_in_flight`` are under way. With overlap (the
   default) that is two: step n+1 is planned while the worker runs step n, before n's tokens are known.
3. ``on_step_result`` records the tokens, ends requests, and sends the tokens to the detokenizer (``outbox.py``).

Every request ends exactly once, through ``leave``, and releases its memory there. Pages that a transfer still touches
are pinned by the hand-over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from ..mem_cache.kv_events import make_event_log
from ..messages.base import unpack_i32
from ..messages.outputs import FinishReason, FinishType, Phase, ReqError, ReqMeta, TokenLogprob
from ..messages.requests import AbortReq, StopReq
from ..messages.worker import StepResult, WorkerReady
from ..runtime.disaggregation_options import DisaggregationMode
from .admission_gate import AdmissionGate
from .arrivals import Arrivals
from .counters import Counters
from .deadlines import Deadlines
from .ended_requests import EndedRequests
from .estimates.cost_model import make_cost_model
from .estimator import Estimator
from .expiry import Expiry
from .forks import Forks
from .grammars import PreparedGrammars
from .handover import Handovers, NoHandovers
from .kv_debug import make_kv_debug
from .kv_memory import KVMemory
from .kv_pool import make_windows
from .memory_terms import PoolSizes
from .options import SchedulerOptions
from .outbox import Outbox, meta_of
from .peer_requests import PeerRequests
from .planner import StepPlanner
from .req import Req, ReqState, Route
from .role import CurrentRole
from .step_builder import InFlightStep
from .tiers import make_tiers

log = logging.getLogger(__name__)


class Scheduler:
    """Owner of all requests of this instance; the module describes its loop."""

    def __init__(
        self,
        options: SchedulerOptions,
        worker: WorkerReady,
        outbox: Outbox,
        make_handovers: Callable[[Scheduler], Handovers] = lambda scheduler: NoHandovers(),
    ) -> None:
        self.options, self.worker, self.outbox = options, worker, outbox
        sizes = PoolSizes.of(worker)
        windows = make_windows(options, sizes)
        self.tiers = make_tiers(options, worker, windows)
        self.kv_events = make_event_log(options, worker)
        debug = make_kv_debug(options, worker, windows, outbox)
        watchers = [*self.tiers.watchers, *([self.kv_events] if self.kv_events is not None else [])]
        self.memory = KVMemory(options, sizes, worker.context_length, windows, self.tiers, debug, watchers)
        cost_model = make_cost_model(worker)
        self.instance_role = CurrentRole(options.disaggregation_mode)
        self.planner = StepPlanner(options, self.memory, worker.device, cost_model, self.instance_role)
        self.reqs: dict[str, Req] = {}
        self.grammars = PreparedGrammars(self.reqs, self.planner.waiting, outbox.to_worker)
        self.ended_requests, self.forks = EndedRequests(), Forks(self.reqs)
        self.counters = Counters()
        self.draining, self.completed_step = False, 0
        self.now = 0.0
        """``time.monotonic()`` at the current tick."""
        self.gate = AdmissionGate()
        self._in_flight: deque[InFlightStep] = deque()
        self.estimator = Estimator(
            cost_model, self.planner, self.memory, self.reqs, self._in_flight, lambda: self.longest
        )
        self.deadlines = Deadlines()
        self._max_in_flight = 1 if options.disable_overlap_schedule else 2
        self.has_freed = False
        """Whether the latest ``run_steps`` left more memory obtainable than it found.

        Hand-overs get memory before steps are planned, so memory of preempted and expired requests serves them in the
        next tick only. That tick should come at once.
        """
        self.arrivals, self.peer_requests = Arrivals(self), PeerRequests(self)
        self._expiry = Expiry(self)
        self.handovers = make_handovers(self)

    @property
    def role(self) -> DisaggregationMode:
        """Role of this instance now: the work that it is offered. It does not limit what the instance can do."""
        return self.instance_role.mode

    @property
    def longest(self) -> int:
        """Maximum length of a request in tokens, prompt and output."""
        return min(self.worker.context_length, self.memory.pool.max_total_tokens)

    # --- requests in ---

    def enqueue(self, req: Req, now: float) -> None:
        """Queue a request that is to compute its prompt here.

        Also have its grammar compiled, and KV of its prompt fetched from a store where that is faster. If it waited
        before, its tenant keeps its place.
        """
        req.state = ReqState.WAITING
        req.phases.enter(Phase.QUEUE, now)
        req.times.ready = now
        cached = self.memory.prefix_len(req)
        req.uncached = req.known_len - cached
        self.planner.waiting.add(req, req.lane)
        self.grammars.queued(req)
        self.tiers.prefetch(req, cached, now, lambda tokens: self.estimator.compute_ms(req, tokens) / 1000)

    def abort(self, msg: AbortReq) -> None:
        """End a request, or all of them, as aborted, and cancel their hand-overs. An unknown rid is ignored."""
        for rid in [msg.rid] if msg.rid else list(self.reqs):
            req = self.reqs.get(rid)
            if req is not None:
                self.end(req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=msg.reason))
                self.handovers.cancel(req, msg.reason)

    def stop(self, msg: StopReq) -> None:
        """End a request as finished, since the detokenizer found a stop string. The client has its answer already."""
        req = self.reqs.get(msg.rid)
        if req is not None:
            self.end(req, ReqState.FINISHED, None)
            self.handovers.cancel(req, "a stop string was found")

    # --- requests out ---

    def end(self, req: Req, state: ReqState, finish: FinishReason | None) -> None:
        """End a request in ``state``, free its memory and send its client ``finish``; None: the client knows already.

        A request that another instance still has is only removed.
        """
        if req.elsewhere:
            self.leave(req, ReqState.MOVED)
            return
        if state is ReqState.FINISHED and req.route is not Route.OUTGOING:
            self.handovers.on_finished(req)
        self.leave(req, state)
        if finish is not None:
            self.outbox.tokens(req, finish, self._meta(req))

    def limit_output(self, req: Req, tokens: int) -> None:
        """Limit prompt and output of a request to ``tokens`` in all, but allow one token of output; end it at that."""
        req.limit_output(tokens)
        if req.output_len >= req.max_new_tokens:
            self.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))
            self.handovers.cancel(req, "the KV pool has become smaller")

    def fail(self, req: Req, status: int, message: str, kind: str = "server_error", code: str | None = None) -> None:
        """End a request because of a fault, and send its client its pending output and an error.

        ``status``: HTTP status. ``kind``, ``code``: fields of the error. Requests that have ended are ignored.
        """
        if req.is_ended:
            return
        log.debug("fails with %d: %s", status, message, extra={"rid": req.rid})
        if req.elsewhere:
            self.leave(req, ReqState.MOVED)
            return
        self.send_output(req)
        self.leave(req, ReqState.FAILED)
        req.failed_with = status
        self.outbox.error(ReqError(req.rid, status, message, kind, code=code, route=req.reported_route))

    def leave(self, req: Req, state: ReqState) -> None:
        """End a request in ``state``, remove it from every queue and free its memory. Send nothing.

        Raises ``AssertionError`` if the request has ended already.
        """
        if req.is_ended:
            raise AssertionError(f"request {req.rid} ends a second time ({req.state} → {state})")
        req.state = state
        del self.reqs[req.rid]
        self.planner.ended(req)
        self.counters.ended(req)
        self.tiers.store.forget(req.rid)
        self.ended_requests.remember(req)
        if req.hold is not None:
            self.memory.finish(req)
        log.debug("%s after %d output tokens", state, req.output_len, extra={"rid": req.rid})

    def _meta(self, req: Req) -> ReqMeta:
        """Return the report for the client: token counts, timing up to now, retractions and route."""
        return meta_of(req, max(self.now, req.times.last_token), has_tiers=self.tiers.enabled)

    # --- steps ---

    @property
    def in_flight_since(self) -> float | None:
        """When the oldest step under way was sent (``time.monotonic()``); None if no step is under way."""
        return self._in_flight[0].sent_at if self._in_flight else None

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive and no step is under way."""
        return not self.reqs and not self._in_flight

    def run_steps(self, now: float) -> None:
        """Plan and send steps until ``max_in_flight`` are under way or nothing can be computed.

        First end requests past their deadline, and queue forks that need not wait any longer.
        """
        self.now = now
        obtainable = self.memory.pool.obtainable
        self._expiry.end_late(now)
        self.forks.release(lambda req: self.enqueue(req, now))
        self.grammars.ask()
        self._move_pages(now)
        while len(self._in_flight) < self._max_in_flight:
            self.estimator.relax_budget(now)
            step = self.planner.plan(now)
            self.estimator.turns_came(self.planner.take_turns(), now)
            for req in self.planner.retraction.latest:
                self.send_output(req)
            self.outbox.all_to_worker(self.tiers.copies.take_before())
            if step is None:
                self._expiry.end_stuck(now)
                break
            pushes = [self.handovers.take_computed_pages(req) for req in step.prefilled]
            step.message.pushes = [push for push in pushes if push is not None]
            self.outbox.to_worker(step.message)
            self._in_flight.append(step.in_flight)
            self._move_pages(now)
        self.has_freed = self.memory.pool.obtainable > obtainable

    def _move_pages(self, now: float) -> None:
        """Send the worker the copies and KV checks that follow all steps planned so far."""
        self.outbox.all_to_worker(self.tiers.take(now))
        self.memory.debug.flush()

    def on_step_result(self, result: StepResult, now: float) -> None:
        """Record the result of the oldest step under way: append its tokens, send output, and end complete requests.

        Requests with bad logits fail.
        """
        self.now = now
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise AssertionError(f"the worker answered step {result.step_id}, step {step.step_id} is due")
        self.completed_step = step.step_id
        self.counters.step_done(step, result)
        self.estimator.step_done(step, result, now)
        step.keep_of_prompts(result)
        bad = set(result.bad_entries)
        if bad:
            self._fail_bad(step.entries[i] for i in bad)
        tokens = unpack_i32(result.next_tokens).tolist()
        for i, entry in enumerate(step.sampled):
            req = step.entries[entry]
            req.pending -= 1
            if not req.is_ended:
                logprob = result.logprobs[i] if result.logprobs is not None else None
                self._on_token(req, tokens[i], logprob, now)

    def catch_up(self) -> None:
        """Do the learning that can wait until the messages of a tick are sent."""
        self.estimator.catch_up()

    def _fail_bad(self, reqs: Iterable[Req]) -> None:
        for req in reqs:
            # Also for requests that have ended: their KV may be cached, and the next request would start from it.
            self.memory.condemn(req)
            if req.is_ended:
                continue
            if req.msg.sampling.grammar is not None:
                text = f"{req.msg.sampling.grammar.field} became too complex: no token can follow"
                self.fail(req, 400, text)
                self.handovers.cancel(req, text)
                continue
            log.error("the model's logits are not finite", extra={"rid": req.rid})
            self.fail(req, 500, "the model produced logits that are not finite for this prompt")
            self.handovers.cancel(req, "logits are not finite")

    def _on_token(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        if req.hold is not None:
            req.hold.proven = req.known_len
        req.times.first_token = req.times.first_token or now
        if req.state is ReqState.WAITING and not req.pending:
            req.phases.enter(Phase.QUEUE, now)  # it was retracted while this step was under way
        elif req.phases.phase is Phase.PREFILL and req.state is not ReqState.PREFILLING:
            req.phases.enter(Phase.TRANSFER if req.route is Route.OUTGOING else Phase.DECODE, now)
        req.append(token, logprob)
        if req.timing.timeline is not None and not req.timing.timeline.first_step:
            req.timing.timeline.first_step = (now - req.times.arrival) * 1000
        if req.route is Route.OUTGOING:
            self.handovers.on_prompt_computed(req, token, logprob)
        else:
            self.on_newest_token(req, token, now)

    def on_newest_token(self, req: Req, token: int, now: float) -> None:
        """Count a token that was just appended to a request, sampled here or by the peer.

        Send pending output if that is due, or end the request if the token was its last.
        """
        req.times.last_token = now
        self.counters.generation_tokens += 1
        self.planner.waiting.shares.output(req.tenant, 1)
        if req.first_token_estimate is not None:
            self.handovers.on_first_token(req, now)
        finish = None
        if token in req.stop_ids:
            finish = FinishReason(FinishType.STOP, matched=token)
        elif req.output_len >= req.max_new_tokens:
            finish = FinishReason(FinishType.LENGTH)
        if finish is not None:
            self.end(req, ReqState.FINISHED, finish)
        elif req.has_output_to_send:
            self.send_output(req)

    def send_output(self, req: Req) -> None:
        """Queue a request's pending output for its client, if there is any. The request must not have ended."""
        if not req.pending_output:
            return
        # The meta goes with the first tokens, so that a stream can report counts. A stop string may end the request at
        # any tokens, so then it goes with all.
        wants_meta = req.msg.sampling.stop or not req.announced
        self.outbox.tokens(req, None, self._meta(req) if wants_meta else None)

    def check_invariants(self) -> None:
        """Check that every page is accounted for and that every hold has an owner. Raises ``InvariantViolation``."""
        users = [r.hold for r in self.reqs.values() if r.hold is not None] + self.handovers.pinned()
        self.memory.check_invariants(users)
