"""A decode's connection to one prefill instance, from its bootstrap address to its end.

    ROUTING (ask the bootstrap server) → GREETING (our worker admits the peer; connect, Hello) → READY (Welcome) → GONE

It connects when it has something to say: the prefill keeps no connection long that says no Hello.

Gone is final and says why; the next request for the same address opens a new link. ``down`` says more than gone: that
the peer's worker can't write into our pool any more, which only our worker knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ...messages.base import Message
from ...messages.worker import KVOrder
from ..bootstrap.registration import Reached
from .control.client import ControlClient


class LinkState(Enum):
    """Where a link stands; see the module."""

    ROUTING = auto()
    GREETING = auto()
    READY = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class PrefillLink:
    """One connection. ``status`` (HTTP) and ``reason`` are for the requests that fail when it is gone.

    ``number``: what the worker calls it. ``same_as``: the link to use in its place, since another address led to the
    same instance before. ``order``: how the prefill's pages lie, and arrive here.
    """

    host: str
    port: int
    opened_at: float = 0.0
    number: int = 0
    state: LinkState = LinkState.ROUTING
    asked: bool = False
    greeted: bool = False
    status: int = 503
    reason: str = ""
    peer_epoch: str = ""
    reached: Reached | None = None
    order: KVOrder | None = None
    client: ControlClient | None = None
    heard_at: float = 0.0
    down: bool = True
    unsent: list[Message] = field(default_factory=list)
    same_as: PrefillLink | None = None

    def send(self, message: Message) -> None:
        """Queue for the peer; one frame a turn of the loop."""
        self.unsent.append(message)

    def flush(self) -> None:
        """Send what is queued."""
        if self.unsent and self.client is not None:
            self.client.send(self.unsent)
        self.unsent = []
