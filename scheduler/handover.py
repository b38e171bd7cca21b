"""What the scheduler needs of whoever hands requests over to other instances: its own view, so that it knows no more.

``disaggregation/`` implements it. An instance that takes no part in hand-overs has none.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..mem_cache.base_prefix_cache import KVHold
from ..messages.metrics import HandoverCounts
from ..messages.moves import MigrateReq
from ..messages.outputs import TokenLogprob
from ..messages.requests import Bootstrap
from ..messages.worker import SendPages, TransferEvent
from .req import Req


class Handovers(Protocol):
    """All hand-overs of an instance. Called from the scheduler's loop only; nothing waits."""

    def start(self, now: float) -> None:
        """Become known to peers."""

    def problem(self, now: float) -> str | None:
        """Why this instance can't serve although its processes are well, None where it can."""

    def warning(self, now: float) -> str | None:
        """What somebody should look after although this instance can serve, None where there is nothing."""

    def found_at(self) -> tuple[str, int] | None:
        """Host ("": where this instance is reached) and port of the bootstrap server that peers find this instance by;
        None before there is one.
        """

    def withdraw(self) -> None:
        """Peers shall not find this instance any more."""

    def close(self, reason: str) -> None:
        """Part from all peers, withdraw, and take none in until ``open``; peers are told why. Nothing is open."""

    @property
    def is_closed(self) -> bool:
        """Whether no peer can write here any more, nor is written to."""

    @property
    def may_resize(self) -> bool:
        """Whether memory of the KV pool may go back to the system while peers are connected."""

    def open(self) -> None:
        """Be found by peers again; nothing where it was not closed."""

    def names_here(self, where: Bootstrap) -> bool:
        """Whether a request's bootstrap address is this instance's own."""

    def may_mean_here(self, where: Bootstrap) -> bool:
        """Whether it may be, under a name of the host that isn't known here."""

    def add(self, req: Req, now: float) -> None:
        """Take over a request whose phases run on two instances."""

    def cancel(self, req: Req, reason: str) -> None:
        """The request has ended here before its hand-over was complete; does nothing for one without."""

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Move a running request to another instance; the answer comes when that is over."""

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """Let instances behind these bootstrap addresses go on with everything that runs here."""

    def role_changed(self) -> None:
        """The scheduler's role is another one: others shall know."""

    def finished(self, req: Req) -> None:
        """A request that runs here is about to be over, as it should, and still has its memory."""

    def chunk_planned(self, req: Req) -> SendPages | None:
        """A step that computes more of the request's prompt is about to be sent: what the worker shall push of it."""

    def first_token(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """An outgoing request's prompt is computed."""

    def came_true(self, req: Req, now: float) -> None:
        """The first token is known of a request for which it was foreseen."""

    def pinned(self) -> list[KVHold]:
        """Memory that transfers may touch, whether its request has ended or not."""

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """News from the worker's transfer engine."""

    def poll(self, now: float) -> None:
        """One turn: read peers, move rooms on, keep deadlines."""

    def flush(self) -> None:
        """Send what this turn has queued for peers."""

    def timeout_ms(self) -> int:
        """How long the loop may sleep."""

    def info(self) -> dict[str, Any]:
        """For /server_info."""

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """For /transfers: the hand-overs that are open."""

    def counts(self) -> HandoverCounts:
        """What was handed over, both ways."""
