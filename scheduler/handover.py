"""The scheduler's interface to hand-overs, so that it needs to know no more about them.

``disaggregation/`` implements it. An instance that takes no part in hand-overs has ``NoHandovers``.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from ..mem_cache.base_prefix_cache import KVHold
from ..messages.metrics import Family
from ..messages.moves import MigrateReq
from ..messages.outputs import TokenLogprob
from ..messages.requests import Bootstrap
from ..messages.worker import SendPages, TransferEvent
from .refusals import NO_EXCHANGE, Refusal
from .req import Req


class Membership(Protocol):
    """This instance among others: whether they find it, and whether it exchanges KV now. No call blocks."""

    def register(self) -> None:
        """Let peers find this instance from now on, with the scheduler's present role."""

    def withdraw(self) -> None:
        """Let new peers find this instance no more. Connected peers stay."""

    def close(self, reason: str) -> None:
        """Disconnect from all peers, and accept no new ones until ``open``; ``is_closed`` tells when that is complete.

        New peers are refused for ``reason``. It is also logged, and is the error of requests that would need a peer. No
        hand-over may be open.
        """

    @property
    def is_closed(self) -> bool:
        """Whether peers can neither write here nor be written to."""

    def open(self) -> None:
        """Let peers find this instance and connect to it again. Do nothing if it was not closed."""

    def problem(self, now: float) -> str | None:
        """Return why this instance cannot serve although its processes are well, or None if it can."""

    def found_at(self) -> tuple[str, int] | None:
        """Return host and port of the bootstrap server by which peers find this instance; None before there is one.

        A host of "" means the address at which this instance is reached.
        """

    def refusal(self) -> Refusal | None:
        """Return why requests with a hand-over are refused now, or None if they are admitted."""

    def names_here(self, where: Bootstrap) -> bool:
        """Return whether a request's bootstrap address is this instance's own."""

    def may_mean_here(self, where: Bootstrap) -> bool:
        """Return whether a bootstrap address may be this instance's own, under a host name that is not known here."""


class Handovers(Protocol):
    """All hand-overs of an instance. Called from the scheduler's loop only; no call blocks."""

    @property
    def membership(self) -> Membership:
        """This instance's registration at its bootstrap server, and its connections to peers as a whole."""

    @property
    def may_resize(self) -> bool:
        """Whether memory of the KV pool may go back to the system while peers are connected."""

    def warning(self, now: float) -> str | None:
        """Return what an operator should look at although this instance can serve, or None."""

    def add(self, req: Req, where: Bootstrap, now: float) -> None:
        """Begin the hand-over of a request with phases that run on two instances. ``where``: its bootstrap address."""

    def cancel(self, req: Req, reason: str) -> None:
        """Cancel the hand-over of a request that has ended here before it was complete. Does nothing without one."""

    def migrate(self, ask: MigrateReq, now: float) -> None:
        """Begin to migrate a running request to another instance. The answer to ``ask`` is sent when that is over."""

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """Begin to migrate every request that runs here to the instances at these bootstrap addresses (host, port)."""

    def on_finished(self, req: Req) -> None:
        """Note that a request here is about to end normally. It still has its memory."""

    def take_computed_pages(self, req: Req) -> SendPages | None:
        """Return the pages of a prompt that the worker shall push to the peer with the step that is about to be sent.

        That step computes more of the prompt. Return None if there is nothing to push.
        """

    def on_prompt_computed(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Note that an outgoing request's prompt is computed, and pass its first token on to the peer."""

    def on_first_token(self, req: Req, now: float) -> None:
        """Learn from the time of a request's first token, which came at ``now``, how good its estimate was."""

    def pinned(self) -> list[KVHold]:
        """Return the KV memory that transfers may read or write, even if its request has ended."""

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Handle an event of the worker's transfer engine."""

    def poll(self, now: float) -> None:
        """Run one tick: read from peers, advance open hand-overs, check deadlines."""

    def flush(self) -> None:
        """Send the messages to peers that this tick has queued."""

    def timeout_ms(self) -> int | None:
        """Return how many milliseconds the loop may sleep before a deadline of a hand-over; None for no limit."""

    def info(self) -> dict[str, Any] | None:
        """Return the ``disaggregation`` part of ``/server_info``; None for an instance that exchanges no KV."""

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """Return a JSON-ready dict for each open hand-over and migration, as ``/transfers`` reports them.

        ``now``: the monotonic time in seconds that their ages are computed from.
        """

    def metrics(self) -> list[Family]:
        """Return the metrics of hand-overs, in both directions."""


class NoMembership:
    """The ``Membership`` of an instance that has no peers."""

    is_closed = True

    def register(self) -> None:
        """Do nothing: no peer needs to find this instance."""

    def withdraw(self) -> None:
        """Do nothing: no peer finds this instance."""

    def close(self, reason: str) -> None:
        """Do nothing: no peer is ever connected."""

    def open(self) -> None:
        """Do nothing: this instance exchanges no KV."""

    def problem(self, now: float) -> None:
        """Return None: no peer needs to find this instance."""

    def found_at(self) -> None:
        """Return None: no bootstrap server knows this instance."""

    def refusal(self) -> Refusal:
        """Return the refusal of every request with a hand-over: this instance exchanges no KV."""
        return NO_EXCHANGE

    def names_here(self, where: Bootstrap) -> bool:
        """Return False: this instance has no bootstrap address."""
        return False

    def may_mean_here(self, where: Bootstrap) -> bool:
        """Return False: this instance has no bootstrap address."""
        return False


class NoHandovers:
    """The ``Handovers`` of an instance that takes no part in any: every request is computed here."""

    membership: Membership = NoMembership()
    may_resize = True

    def warning(self, now: float) -> None:
        """Return None: there are no hand-overs to warn of."""

    def add(self, req: Req, where: Bootstrap, now: float) -> NoReturn:
        """Raise ``AssertionError``: requests with a hand-over are refused."""
        raise AssertionError(f"request {req.rid} was admitted for a hand-over, and this instance exchanges no KV")

    def cancel(self, req: Req, reason: str) -> None:
        """Do nothing: no request has a hand-over."""

    def migrate(self, ask: MigrateReq, now: float) -> NoReturn:
        """Raise ``AssertionError``: the order is refused before."""
        raise AssertionError("a request was to be migrated, and this instance exchanges no KV")

    def move_all(self, to: list[tuple[str, int]]) -> None:
        """Do nothing: requests can't be migrated, and run to their end here."""

    def on_finished(self, req: Req) -> None:
        """Do nothing: no request has a hand-over."""

    def take_computed_pages(self, req: Req) -> None:
        """Return None: nothing is pushed."""

    def on_prompt_computed(self, req: Req, token: int, logprob: TokenLogprob | None) -> NoReturn:
        """Raise ``AssertionError``: no request is outgoing."""
        raise AssertionError(f"the prompt of request {req.rid} was computed for a peer, and there are no peers")

    def on_first_token(self, req: Req, now: float) -> None:
        """Do nothing: no placement was estimated."""

    def pinned(self) -> list[KVHold]:
        """Return []: no transfer touches memory."""
        return []

    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Do nothing: the worker has no transfer engine."""

    def poll(self, now: float) -> None:
        """Do nothing: there are no peers."""

    def flush(self) -> None:
        """Do nothing: there are no peers."""

    def timeout_ms(self) -> None:
        """Return None: the loop may sleep until something else wakes it."""

    def info(self) -> None:
        """Return None: ``/server_info`` then shows no hand-overs."""

    def transfers(self, now: float) -> list[dict[str, Any]]:
        """Return []: no hand-over is open."""
        return []

    def metrics(self) -> list[Family]:
        """Return []: an instance without hand-overs has no metrics of them."""
        return []
