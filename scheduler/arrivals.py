"""Admits requests of clients and of peers, or refuses them with a reason."""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from ..messages.base import I32
from ..messages.error_codes import too_many
from ..messages.outputs import FinishReason, FinishType, ReqError
from ..messages.requests import Bootstrap, GenerateReq
from .outbox import send_interval
from .refusals import (
    DRAINING,
    Refusal,
    most_living,
    refuse_grammar,
    refuse_more,
    refuse_peer,
    refuse_prompt,
    refuse_readout,
    refuse_rid,
)
from .req import Req, ReqState, Route
from .runs_requests import RunsRequests

log = logging.getLogger(__name__)


class Arrivals:
    """Adds requests to the scheduler, in one of the ways in which they come."""

    def __init__(self, scheduler: RunsRequests) -> None:
        self._scheduler = scheduler

    def admit(self, msg: GenerateReq, now: float) -> None:
        """Admit a request at ``now``: queue it, begin its hand-over, or let it wait for the request that it is a fork
        of.

        If it is refused, its client is sent a ``ReqError`` with the reason instead.
        """
        scheduler = self._scheduler
        if (refusal := self.refusal(msg)) is not None:
            log.debug("refused with %d: %s", refusal.status, refusal.message, extra={"rid": msg.rid})
            scheduler.outbox.error(ReqError(msg.rid, *refusal))
            return
        route = Route.LOCAL
        if msg.bootstrap is not None:
            route = self._route(msg.bootstrap)
            if route is Route.INCOMING and msg.bootstrap.source:
                # A peer may send wrong KV. The sender's name in the key keeps it from requests that did not choose that
                # sender.
                msg = msgspec.structs.replace(msg, extra_key=msg.extra_key + msg.bootstrap.source)
        budget = max(1, min(msg.sampling.max_new_tokens, scheduler.memory.pool.end.undone - msg.prompt_len))
        interval = send_interval(msg, scheduler.options.stream_interval)
        req = Req.create(msg, route, ReqState.WAITING, budget, interval, now, scheduler.role)
        req.limit_output(scheduler.memory.pool.max_total_tokens)
        scheduler.reqs[req.rid] = scheduler.planner.came(req)
        scheduler.deadlines.add(req)
        scheduler.counters.requests += 1
        log.debug("%s request of %d prompt tokens", route, req.prompt_len, extra={"rid": req.rid})
        if msg.fork_of:
            self._fork(req, now)
        elif msg.bootstrap is None:
            scheduler.enqueue(req, now)
        else:
            req.state = ReqState.BOOTSTRAPPING
            if route is Route.INCOMING:
                scheduler.grammars.is_ready(msg)
                scheduler.planner.arriving[req.rid] = req
            scheduler.handovers.add(req, msg.bootstrap, now)

    def _fork(self, req: Req, now: float) -> None:
        """Queue a further answer to a prompt that another request brings; it needs no hand-over of its own.

        It may first wait for that request's KV. If the prompt is handed over to another instance, which then computes
        the answers, the fork ends here at once as finished.
        """
        scheduler = self._scheduler
        if req.route is Route.OUTGOING:
            scheduler.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))
            return
        req.route = Route.LOCAL
        if not scheduler.forks.add(req):
            scheduler.enqueue(req, now)

    def _route(self, where: Bootstrap) -> Route:
        """Return whether this instance is the sender or the receiver of a request with a hand-over.

        An explicit leg decides. Otherwise the bootstrap address does, or the role if the address may mean this
        instance.
        """
        # The leg holds whatever the role is now: the role may have changed since the request was sent.
        if where.leg:
            return Route.OUTGOING if where.leg == "prefill" else Route.INCOMING
        here = self._scheduler.handovers.membership
        is_sender = here.names_here(where) or (self._scheduler.role == "prefill" and here.may_mean_here(where))
        return Route.OUTGOING if is_sender else Route.INCOMING

    def refusal(self, msg: GenerateReq) -> Refusal | None:
        """Return why a request cannot be admitted now, or None if it can."""
        scheduler = self._scheduler
        if (closed := DRAINING if scheduler.draining else scheduler.gate.refusal()) is not None:
            return closed
        if msg.rid in scheduler.reqs:
            return refuse_rid(msg.rid)
        if (refusal := refuse_prompt(msg.prompt_len, scheduler.memory)) is not None:
            return refusal
        if (refusal := refuse_grammar(msg, scheduler.worker.device)) is not None:
            return refusal
        if (refusal := refuse_readout(msg, scheduler.worker.vocab_size)) is not None:
            return refusal
        if (where := msg.bootstrap) is not None and (closed := scheduler.handovers.membership.refusal()) is not None:
            return closed
        if where is not None and where.refusal and self._route(where) is Route.INCOMING:
            return refuse_peer(where)
        waiting, room = scheduler.planner.waiting, most_living(scheduler.options)
        if waiting.is_below_share(msg.key_name, room):
            return None
        seconds = partial(scheduler.estimator.queue_seconds, len(waiting) // 2, scheduler.now)
        code = too_many(msg.key_name, has_room_for_others=waiting.has_share_for_others(room))
        return refuse_more(len(scheduler.reqs), scheduler.options, seconds, msg.place, code)

    def admit_moved(self, msg: GenerateReq, output: I32, max_new_tokens: int) -> Req | str:
        """Admit a request that migrates here with its ``output`` so far, and return it; it has no memory and is not
        queued.

        It continues when ``start_moved`` is called. ``max_new_tokens`` includes ``output``. A refused request is not
        added: the reason is returned as text.
        """
        scheduler = self._scheduler
        if (refusal := self.refusal(msg)) is not None:
            return refusal.message
        if msg.readout.is_wanted:
            # A sum over its prompt may have begun elsewhere.
            return "a request that reads a vector from its prompt stays where it is"
        if (most := msg.prompt_len + max_new_tokens) > scheduler.longest:
            return f"the request may grow to {most} tokens; this instance holds at most {scheduler.longest}"
        if len(output) >= max_new_tokens:
            return "the request has all of its output already"
        interval = send_interval(msg, scheduler.options.stream_interval)
        state, now, role = ReqState.TRANSFERRING, scheduler.now, scheduler.role
        req = Req.create(msg, Route.INCOMING, state, max_new_tokens, interval, now, role)
        req.elsewhere = True
        scheduler.grammars.is_ready(msg)
        req.extend(output)
        scheduler.reqs[req.rid] = scheduler.planner.came(req)
        scheduler.deadlines.add(req)
        scheduler.planner.arriving[req.rid] = req
        scheduler.counters.requests += 1
        return req

    def admit_kv_return(self, msg: GenerateReq) -> Req | str:
        """Admit a request that only receives a prompt's KV from the instance that ran it, and return it; nothing is
        computed.

        If it is refused, return the reason as text.
        """
        scheduler = self._scheduler
        if (refusal := self.refusal(msg)) is not None:
            return refusal.message
        if (length := msg.prompt_len) > scheduler.longest:
            return f"the prompt has {length} tokens; this instance holds at most {scheduler.longest}"
        req = Req.create(msg, Route.INCOMING, ReqState.TRANSFERRING, 1, 1)
        scheduler.reqs[msg.rid] = scheduler.planner.came(req)
        req.elsewhere = True
        return req
