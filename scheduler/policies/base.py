"""In which order waiting requests are tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from ...messages.base import I32
from ..req import Req, ReqState


class SchedulePolicy(ABC):
    """Orders those that wait, each *lane* of them by itself: ``WaitingQueue`` says which lane has its turn.

    A policy is told who comes and goes, and keeps what it needs for an order that is cheap to ask for at each step.
    Requests that were retracted are none of its business: they come first, their clients are already reading.
    """

    may_pass = False
    """Whether one that waits may ever go before one that is in the middle of its prompt."""

    @abstractmethod
    def add(self, req: Req, lane: int) -> None:
        """The request waits in ``lane`` from now on."""

    @abstractmethod
    def remove(self, req: Req) -> None:
        """The request waits no longer."""

    @abstractmethod
    def order(self, lane: int, *, computing_only: bool = False) -> Iterator[Req]:
        """Those in ``lane``, the first to be tried first, found as they are asked for. ``computing_only``: without
        those whose KV comes from a peer, as if they did not wait.

        Each once. Whoever was given may be removed before the next is asked for; nobody may be added.
        """

    def stored(self, extra_key: str, tokens: I32, start: int) -> None:
        """``KVMemory.on_stored``: more is cached now."""
        return

    def begun(self, reqs: list[Req]) -> list[Req]:
        """Prompts that have memory and are not computed yet, the first to go on first: as they were begun."""
        return reqs

    def is_before(self, waiting: Req, begun: Req) -> bool:
        """Whether one that waits goes before one that is in the middle of its prompt."""
        return False

    def ahead_of(self, req: Req, uncached: int, others: Iterable[Req]) -> list[Req]:
        """Of ``others``, who wait or are in the middle of their prompts, those that go before ``req``, of which
        ``uncached`` tokens are to be computed; as far as can be foreseen: who is begun, and who came before it.
        """
        return [r for r in others if r.state is ReqState.PREFILLING or r.times.turn < req.times.turn]
