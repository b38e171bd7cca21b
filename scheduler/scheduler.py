"""The scheduler: admits requests, keeps the worker busy, sends tokens out, and knows the state of every request.

One loop serves all routes (docs/architecture.md). ``process.py`` feeds it messages and time; it answers through its
``Outbox``. In order:

1. ``admit_message`` checks a request and queues it, or hands it to the KV manager when a peer is involved.
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

import msgspec

from ..mem_cache.kv_events import make_event_log
from ..messages.base import I32, unpack_i32
from ..messages.error_codes import OVERLOADED
from ..messages.moves import ReqMoved
from ..messages.outputs import FinishReason, FinishType, Phase, ReqError, ReqMeta, TokenLogprob
from ..messages.requests import AbortReq, Bootstrap, GenerateReq, StopReq
from ..messages.worker import StepResult, WorkerReady
from ..runtime.disaggregation_options import DisaggregationMode
from .admission_gate import AdmissionGate
from .counters import Counters
from .deadlines import Deadlines
from .ended_requests import EndedRequests
from .estimates.cost_model import make_cost_model
from .estimator import Estimator
from .forks import Forks
from .handover import Handovers, NoHandovers
from .kv_debug import make_kv_debug
from .kv_memory import KVMemory
from .memory_terms import PoolSizes
from .options import SchedulerOptions
from .outbox import Outbox, meta_of, news_interval
from .planner import StepPlanner
from .refusals import DRAINING, Refusal, most_living, refuse_more, refuse_peer, refuse_prompt, refuse_rid
from .req import Req, ReqState, Route
from .role import InstanceRole
from .step_builder import InFlightStep
from .tiers import KVTiers

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
        self.tiers = KVTiers(options, worker) if worker.host_pages else None
        self.kv_events = make_event_log(options, worker)
        debug = make_kv_debug(options, worker, self.tiers, outbox)
        self.memory = KVMemory(options, PoolSizes.of(worker), worker.context_length, self.tiers, self.kv_events, debug)
        cost_model = make_cost_model(worker)
        self.instance_role = InstanceRole(options.disaggregation_mode)
        self.planner = StepPlanner(options, self.memory, worker.device, cost_model, self.instance_role)
        self.reqs: dict[str, Req] = {}
        self.ended_requests, self.forks = EndedRequests(), Forks(self.reqs)
        self.counters = Counters()
        self.draining, self.completed_step = False, 0
        self.now = 0.0
        """``time.monotonic()`` at the current tick."""
        self.gate = AdmissionGate()
        self._in_flight: deque[InFlightStep] = deque()
        self.estimator = Estimator(cost_model, self.planner, self.memory, self.reqs, self._in_flight, self.longest)
        self.deadlines = Deadlines()
        self._max_in_flight = 1 if options.disable_overlap_schedule else 2
        self.has_freed = False
        """Whether the latest ``run_steps`` left more memory obtainable than it found.

        Hand-overs get memory before steps are planned, so memory of preempted and expired requests serves them in the
        next tick only. That tick should come at once.
        """
        self.handovers = make_handovers(self)

    @property
    def role(self) -> DisaggregationMode:
        """Work that this instance is offered now. It does not limit what the instance can do."""
        return self.instance_role.mode

    @property
    def longest(self) -> int:
        """Maximum length of a request in tokens, prompt and output."""
        return min(self.worker.context_length, self.memory.max_total_tokens)

    # --- requests in ---

    def admit_message(self, msg: GenerateReq, now: float) -> None:
        """Admit a request, or refuse it with a reason."""
        if (refusal := self.refusal(msg)) is not None:
            log.debug("refused with %d: %s", refusal.status, refusal.message, extra={"rid": msg.rid})
            self.outbox.error(ReqError(msg.rid, *refusal))
            return
        route = Route.LOCAL
        if msg.bootstrap is not None:
            route = self._route(msg.bootstrap)
            if route is Route.INCOMING and msg.bootstrap.source:
                # A peer may send wrong KV. The sender's name in the key keeps it from requests that did not choose that
                # sender.
                msg = msgspec.structs.replace(msg, extra_key=msg.extra_key + msg.bootstrap.source)
        budget = max(1, min(msg.sampling.max_new_tokens, self.memory.end.undone - msg.prompt_len))
        news = news_interval(msg, self.options.stream_interval)
        req = Req.create(msg, route, ReqState.WAITING, budget, news, now, self.role)
        req.limit_output(self.memory.max_total_tokens)
        self.reqs[req.rid] = self.planner.came(req)
        self.deadlines.add(req)
        self.counters.requests += 1
        log.debug("%s request of %d prompt tokens", route, req.prompt_len, extra={"rid": req.rid})
        if msg.fork_of:
            self._fork(req, now)
        elif route is Route.LOCAL:
            self.enqueue(req, now)
        else:
            req.state = ReqState.BOOTSTRAPPING
            if route is Route.INCOMING:
                self.planner.arriving[req.rid] = req
            self.handovers.add(req, now)

    def _fork(self, req: Req, now: float) -> None:
        """Add a further answer to a prompt. It needs no hand-over of its own.

        Where the hand-over is outgoing, another instance computes the answers, so the fork ends here at once.
        """
        if req.route is Route.OUTGOING:
            self.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))
            return
        req.route = Route.LOCAL
        if not self.forks.add(req):
            self.enqueue(req, now)

    def _route(self, where: Bootstrap) -> Route:
        """Return whether this instance is the sender or the receiver of a request with a hand-over.

        An explicit leg decides. Otherwise the bootstrap address does, or the role if the address may mean this
        instance.
        """
        # The leg holds whatever the role is now: the role may have changed since the request was sent.
        if where.leg:
            return Route.OUTGOING if where.leg == "prefill" else Route.INCOMING
        here = self.handovers.membership
        is_sender = here.names_here(where) or (self.role == "prefill" and here.may_mean_here(where))
        return Route.OUTGOING if is_sender else Route.INCOMING

    def refusal(self, msg: GenerateReq) -> Refusal | None:
        """Return why a request cannot be admitted now, or None if it can."""
        if (closed := DRAINING if self.draining else self.gate.refusal()) is not None:
            return closed
        if msg.rid in self.reqs:
            return refuse_rid(msg.rid)
        if (refusal := refuse_prompt(msg.prompt_len, self.memory)) is not None:
            return refusal
        if (where := msg.bootstrap) is not None and (closed := self.handovers.membership.refusal()) is not None:
            return closed
        if where is not None and where.refusal and self._route(where) is Route.INCOMING:
            return refuse_peer(where)
        waiting = self.planner.waiting
        if waiting.is_owed_room(msg.key_name, most_living(self.options)):
            return None
        half, estimator = len(waiting) // 2, self.estimator
        return refuse_more(len(self.reqs), self.options, lambda: estimator.queue_seconds(half, self.now), msg.place)

    def enqueue(self, req: Req, now: float) -> None:
        """Queue a request that is to compute its prompt here."""
        req.state = ReqState.WAITING
        req.phases.enter(Phase.QUEUE, now)
        req.times.ready = now
        cached = self.memory.prefix_len(req)
        req.uncached = req.known_len - cached
        self.planner.waiting.add(req)
        if self.tiers is not None:
            self.tiers.prefetch(req, cached, now, lambda tokens: self.estimator.compute_ms(req, tokens) / 1000)

    def may_compute_ahead(self, req: Req) -> bool:
        """Return whether a request may compute before its hand-over's peer asks for it.

        It may while nothing else waits or runs, so it delays no other request. If it has to start over, its prompt is
        cached.
        """
        busy = len(self.planner.waiting) or self.planner.running
        return not (busy or self.options.disable_radix_cache or req.wants_input_logprobs)

    def take_back(self, req: Req) -> None:
        """Set an outgoing request without memory back to bootstrapping: its peer does not want its KV for now."""
        self.planner.forget(req.rid)
        if self.tiers is not None:
            self.tiers.forget(req.rid)
        req.state = ReqState.BOOTSTRAPPING
        req.times.ready = 0.0
        req.phases.enter(Phase.QUEUE, self.now, at="decode")

    def start_over(self, req: Req) -> None:
        """Release a request's memory and reset it to the state before its prefill.

        What it computed of its prompt stays cached.
        """
        self.planner.forget(req.rid)
        self.memory.finish(req)
        req.start_over(self.now)

    def abort(self, msg: AbortReq) -> None:
        """End a request, or all of them, for a client. An unknown rid has ended already and is ignored."""
        for rid in [msg.rid] if msg.rid else list(self.reqs):
            req = self.reqs.get(rid)
            if req is not None:
                self.end(req, ReqState.ABORTED, FinishReason(FinishType.ABORT, message=msg.reason))
                self._cancel(req, msg.reason)

    def stop(self, msg: StopReq) -> None:
        """End a request for which the detokenizer found a stop string. The client has its answer already."""
        req = self.reqs.get(msg.rid)
        if req is not None:
            self.end(req, ReqState.FINISHED, None)
            self._cancel(req, "a stop string was found")

    def _cancel(self, req: Req, reason: str) -> None:
        self.handovers.cancel(req, reason)

    # --- requests out ---

    def end(self, req: Req, state: ReqState, finish: FinishReason | None) -> None:
        """End a request and tell its client ``finish``.

        ``finish`` is None if the client has been told already. A request that another instance still has just leaves.
        """
        if req.elsewhere:
            self.leave(req, ReqState.MOVED)
            return
        if state is ReqState.FINISHED and req.route is not Route.OUTGOING:
            self.handovers.on_finished(req)
        self.leave(req, state)
        if finish is not None:
            self.outbox.tokens(req, finish, self.meta(req))

    def limit_output(self, req: Req, tokens: int) -> None:
        """Limit a request to ``tokens``, prompt and output together.

        It ends now if its output has reached the limit.
        """
        req.limit_output(tokens)
        if req.output_len >= req.max_new_tokens:
            self.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))
            self._cancel(req, "the KV pool has become smaller")

    def fail(self, req: Req, status: int, message: str, kind: str = "server_error", code: str | None = None) -> None:
        """End a request because of a fault, with an error for its client.

        A request that has ended already is ignored.
        """
        if req.is_ended:
            return
        log.debug("fails with %d: %s", status, message, extra={"rid": req.rid})
        if req.elsewhere:
            self.leave(req, ReqState.MOVED)
            return
        self._tell(req)
        self.leave(req, ReqState.FAILED)
        self.outbox.error(ReqError(req.rid, status, message, kind, code=code, route=req.route_told))

    def leave(self, req: Req, state: ReqState) -> None:
        """Remove a request from every queue and release its memory; nothing is sent.

        Raises ``AssertionError`` if the request has ended already.
        """
        if req.is_ended:
            raise AssertionError(f"request {req.rid} ends a second time ({req.state} → {state})")
        req.state = state
        del self.reqs[req.rid]
        self.planner.ended(req)
        self.counters.ended(req)
        if self.tiers is not None:
            self.tiers.forget(req.rid)
        self.ended_requests.remember(req)
        if req.hold is not None:
            self.memory.finish(req)
        log.debug("%s after %d output tokens", state, req.output_len, extra={"rid": req.rid})

    def meta(self, req: Req) -> ReqMeta:
        """Return what the client is told about the request's course, up to now."""
        return meta_of(req, max(self.now, req.times.last_token), has_tiers=self.tiers is not None)

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
        """Plan and send steps until ``max_in_flight`` are under way or nothing can be computed."""
        self.now = now
        obtainable = self.memory.obtainable
        self._expire(now)
        self.forks.release(lambda req: self.enqueue(req, now))
        self._move_pages(now)
        while len(self._in_flight) < self._max_in_flight:
            self.estimator.relax_budget(now)
            step = self.planner.plan(now)
            self.estimator.turns_came(self.planner.take_turns(), now)
            for req in self.planner.retracted:
                self._tell(req)
            if self.tiers is not None:
                self.outbox.all_to_worker(self.tiers.take_before())
            if step is None:
                self._end_stuck(now)
                break
            pushes = [self.handovers.chunk_planned(req) for req in step.prefilled]
            step.message.pushes = [push for push in pushes if push is not None]
            self.outbox.to_worker(step.message)
            self._in_flight.append(step.in_flight)
            self._move_pages(now)
        self.has_freed = self.memory.obtainable > obtainable

    def _move_pages(self, now: float) -> None:
        """Send the worker the copies and KV checks that follow all steps planned so far."""
        if self.tiers is not None:
            self.outbox.all_to_worker(self.tiers.take(now))
        if self.memory.debug is not None:
            self.memory.debug.flush()

    def _expire(self, now: float) -> None:
        """End requests that have exceeded their ``timeout_s``."""
        for req in self.deadlines.pop(now):
            text = f"the request did not finish within its timeout_s of {req.msg.timeout_s:g} s"
            if req.output_len and req.route is not Route.OUTGOING:
                self.end(req, ReqState.ABORTED, FinishReason(FinishType.TIMEOUT, message=text))
            else:
                self.fail(req, 408, f"{text}, and had no output yet", "timeout_error")
            self._cancel(req, text)

    def _end_stuck(self, now: float) -> None:
        """Fail a request that has lacked memory for longer than the queue timeout because hand-overs hold it.

        Hand-overs end by themselves and return their memory, except those with a writer that does not stop.
        """
        stuck, limit = self.planner.stuck, self.options.disaggregation_queue_timeout
        if stuck is not None and now - stuck.since > limit:
            text = f"hand-overs of other requests held the memory that this one needs for {limit:.0f} s"
            self.fail(stuck.req, 503, text, code=OVERLOADED)
            self._cancel(stuck.req, text)

    def on_step_result(self, result: StepResult, now: float) -> None:
        """Record the result of the oldest step under way: its tokens are known now."""
        self.now = now
        step = self._in_flight.popleft()
        if step.step_id != result.step_id:
            raise AssertionError(f"the worker answered step {result.step_id}, step {step.step_id} is due")
        self.completed_step = step.step_id
        self.counters.step_done(step, result)
        self.estimator.step_done(step, result, now)
        for req, scores in zip(step.input_logprobs, result.input_logprobs, strict=True):
            if req.input_logprobs is not None:
                req.input_logprobs += scores
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
        """Do the work that can wait until the messages of a tick are sent."""
        self.estimator.catch_up()

    def _fail_bad(self, reqs: Iterable[Req]) -> None:
        for req in reqs:
            # Also for requests that have ended: their KV may be cached, and the next request would start from it.
            self.memory.condemn(req)
            if req.is_ended:
                continue
            log.error("the model's logits are not finite", extra={"rid": req.rid})
            self.fail(req, 500, "the model produced logits that are not finite for this prompt")
            self._cancel(req, "logits are not finite")

    def _on_token(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        if req.hold is not None:
            req.hold.proven = req.known_len
        req.times.first_token = req.times.first_token or now
        # A token that was under way when its request was retracted ends no phase.
        if req.phases.phase is Phase.PREFILL and req.state is not ReqState.PREFILLING:
            req.phases.enter(Phase.TRANSFER if req.route is Route.OUTGOING else Phase.DECODE, now)
        req.append(token, logprob)
        if req.timing.timeline is not None and not req.timing.timeline.first_step:
            req.timing.timeline.first_step = (now - req.times.arrival) * 1000
        if req.route is Route.OUTGOING:
            self.handovers.on_prompt_computed(req, token, logprob)
        else:
            self.on_newest_token(req, token, now)

    def on_newest_token(self, req: Req, token: int, now: float) -> None:
        """Count a token that was just appended, from here or from the peer.

        Send pending output if it is due, or end the request.
        """
        req.times.last_token = now
        self.counters.generation_tokens += 1
        if (shares := self.planner.waiting.shares) is not None:
            shares.output(req.tenant, 1)
        if req.foreseen is not None:
            self.handovers.on_first_token(req, now)
        finish = None
        if token in req.stop_ids:
            finish = FinishReason(FinishType.STOP, matched=token)
        elif req.output_len >= req.max_new_tokens:
            finish = FinishReason(FinishType.LENGTH)
        if finish is not None:
            self.end(req, ReqState.FINISHED, finish)
        elif req.has_news:
            self._tell(req)

    def take_first_token(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Take an incoming request's first token, which comes ahead of its KV. It may end the request."""
        req.append(token, logprob)
        # The KV of the whole prompt will be here. It is cached for others, if it arrives, even if the request ends now.
        req.computed = req.prompt_len
        self.on_newest_token(req, token, now)

    def start_landed(self, req: Req, now: float) -> None:
        """Start decoding an incoming request: its KV has arrived and was verified."""
        req.computed = req.prompt_len
        self.planner.start_landed(req, now)

    def recompute(self, req: Req, now: float) -> None:
        """Compute here what is not cached of an incoming request: its KV will not come."""
        self.planner.forget(req.rid)
        if req.hold is not None:
            self.memory.finish(req)
        req.route, req.computed = Route.LOCAL, 0
        self.enqueue(req, now)

    def compute_here(self, req: Req, now: float) -> None:
        """Compute an incoming request's prompt here after all, in the memory that was taken for its KV."""
        req.route = Route.LOCAL
        req.times.ready = now
        self.planner.begin(req, now)

    # --- migration ---

    def hold_back(self, req: Req) -> None:
        """Plan no more steps of a request. It stands still once the steps under way are done: ``pending`` is 0 then."""
        self.forks.forget(req)
        self.planner.hold_back(req)

    def go_on(self, req: Req) -> None:
        """Continue a request here that was held back."""
        if not req.is_ended:
            self.planner.go_on(req)

    def leave_moved(self, req: Req, where: ReqMoved) -> None:
        """End a request that continues elsewhere. Its client gets all pending output first, then the new location."""
        self._tell(req)
        self.leave(req, ReqState.MOVED)
        self.outbox.answer(where)

    def admit_moved(self, msg: GenerateReq, output: I32, max_new_tokens: int) -> Req | str:
        """Admit a migrating request that has ``output`` already; it waits for ``start_moved``.

        Return a reason if refused.
        """
        if (refusal := self.refusal(msg)) is not None:
            return refusal.message
        if (most := msg.prompt_len + max_new_tokens) > self.longest:
            return f"the request may grow to {most} tokens; this instance holds at most {self.longest}"
        if len(output) >= max_new_tokens:
            return "the request has all of its output already"
        news = news_interval(msg, self.options.stream_interval)
        req = Req.create(msg, Route.INCOMING, ReqState.TRANSFERRING, max_new_tokens, news, self.now, self.role)
        req.elsewhere = True
        req.extend(output)
        self.reqs[req.rid] = self.planner.came(req)
        self.deadlines.add(req)
        self.planner.arriving[req.rid] = req
        self.counters.requests += 1
        return req

    def admit_gift(self, msg: GenerateReq) -> Req | str:
        """Add a request for the returned KV of a prompt that ran elsewhere; nothing is computed.

        Return a reason if refused.
        """
        if (refusal := self.refusal(msg)) is not None:
            return refusal.message
        if (length := msg.prompt_len) > self.longest:
            return f"the prompt has {length} tokens; this instance holds at most {self.longest}"
        req = self.reqs[msg.rid] = self.planner.came(Req.create(msg, Route.INCOMING, ReqState.TRANSFERRING, 1, 1))
        req.elsewhere = True
        return req

    def start_moved(self, req: Req, now: float) -> None:
        """Continue a migrated request: all of its output is known, and its KV is here as far as it was handed over."""
        req.elsewhere = False
        req.untold = req.token_ids[req.prompt_len : req.known_len].tolist()
        req.untold_logprobs = list(req.logprobs)
        if req.hold is not None and self.memory.extend(req):
            self.planner.start_landed(req, now)
        else:
            self.recompute(req, now)
        self._tell(req)

    def _tell(self, req: Req) -> None:
        """Send a request's pending output, if there is any; the request has not ended."""
        if not req.untold:
            return
        # The meta goes with the first tokens, so that a stream can report counts. A stop string may end the request at
        # any tokens, so then it goes with all.
        wants_meta = req.msg.sampling.stop or not req.announced
        self.outbox.tokens(req, None, self.meta(req) if wants_meta else None)

    def check_invariants(self) -> None:
        """Check that memory is consistent and every hold has an owner. Raises ``InvariantViolation``."""
        users = [r.hold for r in self.reqs.values() if r.hold is not None] + self.handovers.pinned()
        self.memory.check_invariants(users)
