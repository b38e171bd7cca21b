"""Passes messages of peers, and the end of peers, to the sides of this instance that they concern.

Each side registers a handler for every message type that it takes. Two sides may take the same type, because a
migration reuses the messages of a hand-over. Then the first side that claims the hand-over gets the message, and the
side that was registered last gets the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...messages.base import HandoverId, Message
from .peer import Peer

Handler = Callable[[Peer, Any, float], None]
"""Handles a message of a peer; the last argument is the time of the tick."""
Handlers = Mapping[type[Message], Handler]
TooLong = Mapping[type[Message], Callable[[Peer, Any], None]]
"""Handles a message to a peer that was not sent because it exceeds the peer's frame limit, by its type."""


class _Claimed(NamedTuple):
    claims: Callable[[HandoverId], bool]
    handle: Handler


def ignore(peer: Peer, message: Any, now: float) -> None:
    """Do nothing: the message needs no reaction."""


class PeerDispatcher:
    """Passes each message of a peer to the side that handles its type; see ``PeerOwner``."""

    def __init__(self) -> None:
        self._handlers: dict[type[Message], list[_Claimed]] = {}
        self._too_long: dict[type[Message], Callable[[Peer, Any], None]] = {}
        self._gone: list[Callable[[Peer], None]] = []
        self._down: list[Callable[[Peer], None]] = []

    def register(
        self,
        handlers: Handlers,
        on_gone: Callable[[Peer], None],
        *,
        claims: Callable[[HandoverId], bool] = lambda handover: True,
        on_down: Callable[[Peer], None] = lambda peer: None,
        too_long: TooLong | None = None,
    ) -> None:
        """Add a side: its handlers of messages, and callbacks for the end of peers and for messages that are too long.

        ``claims`` tells whether a hand-over is the side's, for message types that other sides handle, too.
        """
        for kind, handle in handlers.items():
            self._handlers.setdefault(kind, []).append(_Claimed(claims, handle))
        self._too_long.update(too_long or {})
        self._gone.append(on_gone)
        self._down.append(on_down)

    def on_message(self, peer: Peer, message: Any, now: float) -> None:
        """Pass the message to the first side that claims its hand-over, else to the last side with its type."""
        *others, last = self._handlers[type(message)]
        side = next((side for side in others if side.claims(message.handover)), last)
        side.handle(peer, message, now)

    def on_gone(self, peer: Peer) -> None:
        """Notify all sides that a peer has ended, in order of registration. It may still write until ``on_down``."""
        for on_gone in self._gone:
            on_gone(peer)

    def on_down(self, peer: Peer) -> None:
        """Notify all sides that the data link of a peer that is gone has ended: it can no longer write here."""
        for on_down in self._down:
            on_down(peer)

    def on_too_long(self, peer: Peer, message: Message) -> None:
        """Pass a message that was not sent to the handler registered for its type. Ignores types without a handler."""
        # All other messages have limits of their own.
        if type(message) in self._too_long:
            self._too_long[type(message)](peer, message)
