"""What the hand-over's state machines need from the scheduler that they live in: a narrow view, so that they can be
tested alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...mem_cache.base_prefix_cache import KVHold
from ...messages.base import I32, Message
from ...messages.outputs import FinishReason, TokenLogprob
from ...scheduler.req import Req, ReqState


class HandoverHost(Protocol):
    """The scheduler, seen from a hand-over."""

    epoch: str
    """This instance's epoch."""

    def to_worker(self, message: Message) -> None:
        """Queue a command for the model worker, behind the steps that were planned before."""

    def enqueue(self, req: Req, now: float) -> None:
        """An outgoing request's peer is there: it may wait for its turn to compute."""

    def end_outgoing(self, req: Req) -> None:
        """The peer has everything: end the request here with its first token."""

    def start_incoming(self, req: Req, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """The KV has landed and was verified: decode from here on."""

    def admit_incoming(self, req: Req, others: Iterable[Req]) -> bool:
        """Take memory, not verified, for the whole prompt; ``others`` hold some for later output. False: not now."""

    def end(self, req: Req, state: ReqState, finish: FinishReason | None) -> None:
        """End the request."""

    def fail(self, req: Req, status: int, message: str, kind: str = "server_error") -> None:
        """End the request in an error. Does nothing for one that has ended."""

    def pin(self, req: Req) -> KVHold:
        """Keep the request's memory until ``unpin``, though the request may end before."""

    def unpin(self, hold: KVHold) -> None:
        """No transfer touches this memory any more."""

    def pages(self, req: Req, start: int, end: int) -> I32:
        """The request's pages for positions ``[start, end)``."""

    @property
    def last_step_id(self) -> int:
        """The newest step that was sent to the worker."""

    @property
    def completed_step(self) -> int:
        """The newest step that the worker has finished."""
