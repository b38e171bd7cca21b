"""The scheduler's interface to hand-overs, so that it needs to know no more about them.

``disaggregation/`` implements it. An instance that takes no part in hand-overs has none.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..mem_cache.base_prefix_cache import KVHold
from ..messages.metrics import Family
from ..messages.moves import MigrateReq
from ..messages.outputs import TokenLogprob
from ..messages.requests import Bootstrap
from ..messages.worker import SendPages, TransferEvent
from .req import Req


class Handovers(Protocol):
    """All hand-overs of an instance. Called from the scheduler's loop only; no call blocks."""

    def start(self, now: float) -> None:
        """Register with peers."""

    def problem(self, now: float) -> str | None:
        """Return why this instance cannot serve although its processes are well, or None if it can."""

    def warning(self, now: float) -> str | None:
        """Return what an operator should look at although this instance can serve, or None."""

    def found_at(self) -> tuple[str, int] | None:
        """Return host and port of the bootstrap server by which peers find this instance; None before there is one.

        A host of "" means the address at which this instance is reached.
        """

    def withdraw(self) -> None:
        """Let peers find this instance no more."""

    def close(self, reason: str) -> None:
        """Disconnect from all peers and refuse new ones until ``open``, telling them ``reason``.

        No hand-over may be open.
        """

    @property
    def is_closed(self) -> bool:
        """Whether peers can neither write here nor be written to."""

    @property
    def may_resize(self) -> bool:
        """Whether memory of the KV pool may go back to the system while peers are connected."""

    def open(self) -> None:
        """Let peers find this instance again. Does nothing if it was not closed."""

    def names_here(self, where: Bootstrap) -> bool:
        """Return whether a request's bootstrap address is this instance's own."""

    def may_mean_here(self, where: Bootstrap) -> bool:
        """Return whether the address may be this instance's own, under a host name that is not known here."""

    def add(self, req: Req, now: float) -> None:
        """Take over a request with phases that run on two instances."""

    def cancel(self, req: Req, reason: str) -> None:
        """Cancel the hand-over of a request that has ended here before it was complete. Does nothing without one."""

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Migrate a running request to another instance. The answer follows when that is over."""

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """Migrate everything that runs here to the instances at these bootstrap addresses."""

    def role_changed(self) -> None:
        """Report to others that the scheduler's role has changed."""

    def finished(self, req: Req) -> None:
        """Note that a request here is about to end normally. It still has its memory."""

    def chunk_planned(self, req: Req) -> SendPages | None:
        """Return what the worker shall push of a prompt when the step that is about to be sent computes more of it."""

    def first_token(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Note that an outgoing request's prompt is computed."""

    def came_true(self, req: Req, now: float) -> None:
        """Compare the time of a request's first token, now known, with its estimate."""

    def pinned(self) -> list[KVHold]:
        """Return the memory that transfers may touch, whether its request has ended or not."""

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Handle an event of the worker's transfer engine."""

    def poll(self, now: float) -> None:
        """Run one tick: read from peers, advance rooms, check deadlines."""

    def flush(self) -> None:
        """Send what this tick has queued for peers."""

    def timeout_ms(self) -> int:
        """Return how long the loop may sleep, in milliseconds."""

    def info(self) -> dict[str, Any]:
        """Return the ``disaggregation`` part of ``/server_info``."""

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """Return the open hand-overs for ``/transfers``."""

    def metrics(self) -> list[Family]:
        """Return the metrics of hand-overs, in both directions."""
