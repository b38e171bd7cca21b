"""Prompts that a prefill computes for this instance: their first tokens, and what becomes of their KV.

The first token arrives before the KV, and goes to the client at once. If the KV fails after it, the prompt is computed
here. Before it the request fails, and the client may retry.
"""

from __future__ import annotations

import logging

from ...messages.handover import FirstToken
from ...messages.outputs import Timeline, Timing, TokenLogprob
from ...scheduler.req import Req
from ...scheduler.scheduler import Scheduler
from .kv_receiver import KVReceiver
from .placement_policy import PlacementPolicy

log = logging.getLogger(__name__)

ROUNDING = 0.5
"""Upper bound of a valid logprob. Rounding can put one slightly above 0."""


class IncomingPrompts:
    """The ``KVConsumer`` of prompts that a prefill computes."""

    def __init__(self, scheduler: Scheduler, policy: PlacementPolicy) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self.recomputed = 0
        """Number of prompts that were computed here because their hand-over failed after the first token."""

    def on_allocated(self, receiver: KVReceiver) -> None:
        """Count how much of the prompt was found in the prefix cache, when the request gets its first memory.

        Do nothing if it had memory before and gave it back, so that each prompt is counted once.
        """
        if not receiver.allocated_at:
            self._scheduler.planner.count_lookup(receiver.req)

    def take_first_token(self, receiver: KVReceiver, msg: FirstToken, now: float) -> str | None:
        """Send the first token, which the prefill has computed, to the client. Return why it is invalid, or None."""
        req = receiver.req
        problem = first_token_problem(msg, req, self._scheduler.worker.vocab_size)
        if problem is not None:
            return problem
        # Logprobs that the client did not ask for are dropped.
        logprob = msg.logprob if req.msg.logprobs is not None else None
        scores = msg.input_logprobs if req.wants_input_logprobs else None
        receiver.awaits_first_token = False
        self._scheduler.planner.claims.began(req.rid)
        req.times.first_token = now
        # Clocks of two hosts can't be compared, durations can. Time that neither side waited or computed is the
        # hand-over.
        req.phases.credit(msg.timing.queue_ms, msg.timing.prefill_ms, msg.timing.ahead_ms, now)
        set_timing(receiver, msg.timing, req.times.arrival)
        req.cached_tokens, req.input_logprobs = min(msg.cached_tokens, req.prompt_len), scores
        req.cached_beyond = msg.cached_beyond
        self._scheduler.peer_requests.take_first_token(req, msg.token, logprob, now)
        return None

    def landed(self, receiver: KVReceiver, there: Timing, now: float) -> None:
        """Start to decode a request: its whole KV has arrived from the prefill and was verified.

        ``there``: where the prefill has spent its time. It is recorded in the request's timing.
        """
        req = receiver.req
        self._policy.learn_lag(receiver.peer.epoch, len(receiver.pages[0]) // 4, now - req.times.first_token, now)
        set_timing(receiver, there, now)
        self._scheduler.peer_requests.start_landed(req, now)

    def lost(self, receiver: KVReceiver, status: int, reason: str, now: float) -> None:
        """Compute the prompt here if its first token was sent to the client. Otherwise fail the request with
        ``status``.
        """
        req = receiver.req
        if receiver.awaits_first_token:
            self._scheduler.fail(req, status, reason, "transfer_error")
            return
        log.info("its prompt is computed here", extra={"rid": req.rid})
        self.recomputed += 1
        self._scheduler.peer_requests.recompute(req, now)


def is_sound(score: TokenLogprob, vocab_size: int) -> bool:
    """Return whether all token ids are in the vocabulary and all logprobs are None or numbers below ``ROUNDING``."""
    pairs = [(score.token_id, score.logprob), *score.top]
    return all(0 <= token < vocab_size and (p is None or p < ROUNDING) for token, p in pairs)


def first_token_problem(msg: FirstToken, req: Req, vocab_size: int) -> str | None:
    """Return why a prefill's first token or its logprobs are invalid, or None if they are valid."""
    if not 0 <= msg.token < vocab_size:
        return f"the prefill instance sent an invalid first token {msg.token} (vocabulary size {vocab_size})"
    scores = msg.input_logprobs if req.wants_input_logprobs else None
    if scores is not None and len(scores) > req.prompt_len:
        return "the prefill instance sent more prompt logprobs than the prompt has tokens"
    logprob = msg.logprob if req.msg.logprobs is not None else None
    if not all(is_sound(score, vocab_size) for score in [*(scores or ()), *([logprob] if logprob else [])]):
        return "the prefill instance sent invalid logprobs"
    return None


def set_timing(receiver: KVReceiver, there: Timing, verified: float) -> None:
    """Record the prefill's timing, ``there``, in the request. Called with the first token, and again when the KV has
    arrived.

    ``verified``: time of the KV check or, before it, the arrival of the request.
    """
    timing = receiver.req.timing
    timing.transfer_bytes = there.transfer_bytes
    timing.timeline = timeline(receiver, there.timeline or Timeline(), verified)


def timeline(receiver: KVReceiver, there: Timeline, verified: float) -> Timeline:
    """Return the timeline of a hand-over, in milliseconds since the request's arrival on this instance.

    ``there``: the prefill's own part of it, from the time at which it was asked for the KV. ``verified``: time of the
    KV check or, before it, the arrival of the request.
    """
    arrival = receiver.req.times.arrival
    asked = (receiver.requested_at - arrival) * 1000
    pushed = there.last_byte > 0
    return Timeline(
        bootstrap=(receiver.queued_at - arrival) * 1000,
        allocate=(receiver.allocated_at - arrival) * 1000,
        queue=asked + max(0.0, there.queue),
        prefill=asked + max(0.0, there.prefill),
        first_byte=asked + max(0.0, there.first_byte) if pushed else 0.0,
        last_byte=asked + there.last_byte if pushed else 0.0,
        verify=(verified - arrival) * 1000,
    )
