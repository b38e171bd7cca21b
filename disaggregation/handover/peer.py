"""Another instance that this one exchanges KV with, from the search for it to its end.

    FINDING (ask its bootstrap server) → GREETING (dial, say Hello) ─▶ OPEN (both have said Hello) ─▶ GONE
                              (it dials us, and says a good Hello) ─▶ OPEN

Once the connection is open, it does not matter which side dialled. The receiver opens each direction of KV::

    reading:  CLOSED → WANTED → ADMITTING (our worker lets it in) → ADMITTED → INVITED (we said so) → READY (Welcome)
    writing:  CLOSED → WANTED (Invite came) → CONNECTING (our worker connects to its pool) → READY (we said Welcome)

GONE is final and has a reason. A later request for the same instance gets a new peer. ``down`` says more than GONE: the
peer's worker can't write into our pool any more, nor our worker into its pool. Only our worker knows that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from ...messages.base import Message
from ...messages.handover import Hello
from ...messages.worker import KVOrder


class PeerState(Enum):
    """State of the connection to a peer; the module docstring draws the transitions."""

    FINDING = auto()
    GREETING = auto()
    OPEN = auto()
    GONE = auto()


class Reading(Enum):
    """State of the direction in which a peer writes KV to this instance."""

    CLOSED = auto()
    WANTED = auto()
    ADMITTING = auto()
    ADMITTED = auto()
    INVITED = auto()
    READY = auto()


class Writing(Enum):
    """State of the direction in which this instance writes KV to a peer."""

    CLOSED = auto()
    WANTED = auto()
    CONNECTING = auto()
    READY = auto()


class Spare(NamedTuple):
    """A second connection made by a peer, by its number in the control port, and the Hello that it brought."""

    connection: int
    hello: Hello


@dataclass(slots=True, eq=False)
class Peer:
    """State of one other instance: its connection, both directions of KV, and the messages to send to it."""

    state: PeerState
    number: int = 0
    """Number of the worker's link to this peer."""
    wanted_at: float = 0.0
    """Time at which its KV was first wanted, or at which the peer became OPEN."""
    last_step_at: float = 0.0
    """Time of the last step in opening a direction: a command to the worker or an invitation to the peer."""
    host: str = ""
    """Host of the bootstrap server that it was found by. Empty if the peer dialled."""
    port: int = 0
    """Port of that bootstrap server."""
    epoch: str = ""
    connection: int | None = None
    """Number of its connection in the control port."""
    hello: Hello | None = None
    """The Hello that it sent. Set in OPEN."""
    pool: str = ""
    """Digest of the transfer metadata that proves the instance's identity."""
    registered: bool = False
    """Whether a bootstrap server has confirmed ``pool``."""
    spare: Spare | None = None
    """A connection that the peer made while we dial it, in case ours fails. Set in GREETING."""
    invitation: bytes = b""
    """Metadata that our worker needs to reach its pool."""
    heard_at: float = 0.0
    """Time of its last message."""
    reading: Reading = Reading.CLOSED
    writing: Writing = Writing.CLOSED
    down: bool = True
    """Whether neither worker can write into the other's pool."""
    status: int = 503
    """HTTP status of requests that fail when the peer is gone. Set in GONE."""
    reason: str = ""
    """Error message of these requests. Set in GONE."""
    same_as: Peer | None = None
    """The peer to use instead, because another address led to the same instance before."""
    unsent: list[Message] = field(default_factory=list)
    """Messages for the next frame."""

    def __str__(self) -> str:
        found_by = f" ({self.host}:{self.port})" if self.host else ""
        return f"instance {self.epoch or 'unknown'}{found_by}"

    @property
    def gone(self) -> bool:
        """Whether the peer is in its final state."""
        return self.state is PeerState.GONE

    @property
    def readable(self) -> bool:
        """Whether this instance can ask the peer for KV: its worker has connected to this instance's pools."""
        return self.reading is Reading.READY and not self.gone

    @property
    def writable(self) -> bool:
        """Whether this instance can send KV to the peer: this instance's worker has connected to the peer's pools."""
        return self.writing is Writing.READY and not self.gone

    @property
    def order(self) -> KVOrder | None:
        """Order of the bytes within the pages that come from this peer. None before its Hello."""
        return self.hello.layout.order if self.hello is not None else None

    def send(self, message: Message) -> None:
        """Queue a message for the peer. Each tick sends the queued messages in one frame, if they fit."""
        self.unsent.append(message)

    def info(self) -> dict[str, Any]:
        """Return the peer's entry for ``/server_info``, JSON-ready."""
        info: dict[str, Any] = {"epoch": self.epoch, "state": self.state.name.lower()}
        if self.host:
            info["bootstrap"] = f"{self.host}:{self.port}"
        return info | {"reading": self.reading.name.lower(), "writing": self.writing.name.lower()}
