"""What the scheduler has to say, collected over one turn of its loop and sent as one frame for each receiver."""

from __future__ import annotations

from typing import Protocol

from ..messages.base import Message
from ..messages.outputs import DetokenizeInit, FinishReason, ReqError, ReqMeta, ReqTokens, TokenBatch, TokenLogprob
from .req import Req

PROMPT_TAIL = 8
"""Prompt tokens that the detokenizer gets as context of the first output token."""


class SendsMessages(Protocol):
    """The sending end of a channel."""

    def send(self, *messages: Message) -> None:
        """Send as one frame."""


class Outbox:
    """Messages to the worker and to the detokenizer, in order."""

    def __init__(self, worker: SendsMessages, detokenizer: SendsMessages) -> None:
        self._worker = worker
        self._detokenizer = detokenizer
        self._to_worker: list[Message] = []
        self._to_detokenizer: list[Message] = []

    def to_worker(self, message: Message) -> None:
        """Queue for the worker."""
        self._to_worker.append(message)

    def answer(self, message: Message) -> None:
        """Queue an answer for HTTP; it travels behind the tokens that were queued before."""
        self._to_detokenizer.append(message)

    def tokens(
        self,
        req: Req,
        token_ids: list[int],
        finish: FinishReason | None,
        meta: ReqMeta | None,
        logprobs: list[TokenLogprob] | None,
    ) -> None:
        """Queue new tokens of a request; neighbours share one ``TokenBatch``."""
        init = None
        if not req.announced:
            tail = req.token_ids[max(0, req.prompt_len - PROMPT_TAIL) : req.prompt_len].tobytes()
            init = DetokenizeInit(req.msg.sampling.stop, req.msg.sampling.skip_special_tokens, tail)
            req.announced = True
        item = ReqTokens(req.rid, token_ids, finish, meta, logprobs, init)
        last = self._to_detokenizer[-1] if self._to_detokenizer else None
        if isinstance(last, TokenBatch):
            last.items.append(item)
        else:
            self._to_detokenizer.append(TokenBatch([item]))

    def error(self, rid: str, status: int, message: str, kind: str, field: str | None = None) -> None:
        """Queue the end of a request in an error."""
        self._to_detokenizer.append(ReqError(rid, status, message, kind, field))

    def flush(self) -> None:
        """Send everything."""
        if self._to_worker:
            self._worker.send(*self._to_worker)
            self._to_worker = []
        if self._to_detokenizer:
            self._detokenizer.send(*self._to_detokenizer)
            self._to_detokenizer = []
