"""Outgoing messages of the scheduler, collected over one tick and sent as one frame for each receiver.

A message for every token would burden detokenizer, HTTP, router and client. So a request's tokens wait in
``Req.pending_output`` until there are ``send_interval`` of them, or until the request ends or is retracted.
"""

from __future__ import annotations

from typing import TypeVar

from ..messages.base import Message
from ..messages.channel import SendsMessages
from ..messages.outputs import (
    DetokenizeInit,
    FinishReason,
    Phase,
    PromptReport,
    ReqError,
    ReqMeta,
    ReqTokens,
    Timing,
    TokenBatch,
)
from ..messages.question import Answer, Question, RefusedAnswer
from ..messages.requests import GenerateReq
from ..messages.too_large import send_or_explain
from .req import Req
from .tier_counts import NOTHING_BEYOND

A = TypeVar("A", bound=Answer)
PROMPT_TAIL = 8
"""Prompt tokens that the detokenizer gets as context of the first output token."""

QUIET_INTERVAL = 32
"""Tokens sent at a time if no client sees them before the end. Not all at once: the end would wait for their text."""


def send_interval(msg: GenerateReq, stream_interval: int) -> int:
    """Return how many output tokens of a request are collected before they are sent.

    Only the detokenizer finds stop strings, and what is computed after one is wasted. So it gets each token at once,
    unless the client streams and has chosen to hear less often (``stream_interval``).
    """
    if msg.stream:
        return stream_interval
    return 1 if msg.sampling.stop else QUIET_INTERVAL


def meta_of(req: Req, now: float, *, has_tiers: bool) -> ReqMeta:
    """Return the report that the client gets with the answer: token counts, timing up to ``now``, retractions and
    route.
    """
    return ReqMeta(
        prompt_tokens=req.prompt_len,
        completion_tokens=req.output_len,
        cached_tokens=req.cached_tokens,
        timing=timing_at(req, now),
        retractions=req.retractions,
        route=req.reported_route,
        cached_beyond=req.cached_beyond or (NOTHING_BEYOND if has_tiers else None),
        held=req.held,
    )


def timing_at(req: Req, now: float) -> Timing:
    """Update the request's ``timing`` (milliseconds by phase, to first token) up to ``now``, and return it."""
    phases, timing, times = req.phases, req.timing, req.times
    phases.upto(now)
    timing.tokenize_ms = phases.spent(Phase.TOKENIZE)
    timing.queue_ms = phases.spent(Phase.QUEUE)
    timing.prefill_ms = phases.spent(Phase.PREFILL)
    timing.transfer_ms = phases.spent(Phase.TRANSFER)
    timing.decode_ms = phases.spent(Phase.DECODE)
    timing.first_token_ms = max(0.0, times.first_token - times.arrival) * 1000 if times.first_token else 0.0
    timing.here, timing.phases = phases.here, phases.times()
    return timing


class NoTransferEngine:
    """The channel to the transfer engine of an instance that exchanges no KV."""

    def send(self, *messages: Message) -> None:
        """Raise ``AssertionError``: no part of such an instance has anything to send there."""
        raise AssertionError(f"there is no transfer engine for {', '.join(type(m).__name__ for m in messages)}")


NO_TRANSFER_ENGINE = NoTransferEngine()


class Outbox:
    """Messages to the worker, to its transfer engine and to the detokenizer, each in order."""

    def __init__(
        self, worker: SendsMessages, detokenizer: SendsMessages, transfer: SendsMessages = NO_TRANSFER_ENGINE
    ) -> None:
        self._worker = worker
        self._transfer = transfer
        self._to_transfer: list[Message] = []
        self._detokenizer = detokenizer
        self._to_worker: list[Message] = []
        self._to_detokenizer: list[Message] = []

    def to_worker(self, message: Message) -> None:
        """Queue a message for the worker; ``flush`` sends it."""
        self._to_worker.append(message)

    def all_to_worker(self, messages: list[Message]) -> None:
        """Queue messages for the worker, in order; ``flush`` sends them."""
        self._to_worker += messages

    def to_transfer(self, message: Message) -> None:
        """Queue a message for the worker's transfer engine; it overtakes the steps that the worker has to do."""
        self._to_transfer.append(message)

    def answer(self, message: Message) -> None:
        """Queue a message for the HTTP process. It goes through the detokenizer, after the tokens that were queued
        before.
        """
        self._to_detokenizer.append(message)

    def reply(self, question: Question[A], answer: A | RefusedAnswer) -> None:
        """Queue the answer to a question for the HTTP process, and set the answer's id to the question's."""
        answer.id = question.id
        self.answer(answer)

    def tokens(self, req: Req, finish: FinishReason | None, meta: ReqMeta | None) -> None:
        """Queue a request's pending output for the detokenizer, and empty that list.

        ``finish``: how the request has ended, None if it goes on. ``meta``: the report to send along, None for none.
        The first call for a request also sends what detokenizing it needs.
        """
        init = prompt = None
        if not req.announced:
            tail = req.token_ids[max(0, req.prompt_len - PROMPT_TAIL) : req.prompt_len].tobytes()
            sampling = req.msg.sampling
            skips, least = sampling.skip_special_tokens, sampling.min_new_tokens
            init = DetokenizeInit(sampling.stop, skips, tail, least, sampling.marks)
            # A router drops what the prefill of a pair answers: the decode reports the same.
            is_dropped = req.msg.bootstrap is not None and req.msg.bootstrap.leg == "prefill"
            # Complete by now: prompt logprobs are there before the first output token.
            is_wanted = req.msg.return_prompt or req.readout or req.input_logprobs is not None
            if is_wanted and not is_dropped:
                ids = req.msg.input_ids if req.msg.return_prompt else b""
                prompt = PromptReport(ids, req.input_logprobs, req.readout)
            req.announced = True
        item = ReqTokens(req.rid, req.pending_output, finish, meta, req.pending_logprobs or None, init, prompt)
        req.pending_output = []
        if req.pending_logprobs:
            req.pending_logprobs = []
        last = self._to_detokenizer[-1] if self._to_detokenizer else None
        # The report on a prompt may be long. Such an item is a message of its own, which a frame can hold or not.
        if isinstance(last, TokenBatch) and prompt is None and last.items[-1].prompt is None:
            last.items.append(item)
        else:
            self._to_detokenizer.append(TokenBatch([item]))

    def error(self, error: ReqError) -> None:
        """Queue the error that ends a request, for its client."""
        self._to_detokenizer.append(error)

    def flush(self) -> list[str]:
        """Send all queued messages to the transfer engine, the worker and the detokenizer.

        Return the rids of requests that ended because a message to the detokenizer fits into no frame. Their clients
        have got an error.
        """
        if self._to_transfer:
            self._transfer.send(*self._to_transfer)
            self._to_transfer = []
        if self._to_worker:
            self._worker.send(*self._to_worker)
            self._to_worker = []
        if not self._to_detokenizer:
            return []
        messages, self._to_detokenizer = self._to_detokenizer, []
        return send_or_explain(self._detokenizer, messages)
