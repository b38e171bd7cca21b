"""Another instance, from the first word with it to its end.

    FINDING (ask its bootstrap server) → GREETING (dial, say Hello) ─▶ OPEN (both have said Hello) ─▶ GONE
                              (it dials us, and says a good Hello) ─▶ OPEN

Once it is open, who dialled means nothing. Each direction of KV is opened by whoever wants to receive::

    reading:  CLOSED → WANTED → ADMITTING (our worker lets it in) → ADMITTED → INVITED (we said so) → READY (Welcome)
    writing:  CLOSED → WANTED (Invite came) → CONNECTING (our worker connects to its pool) → READY (we said Welcome)

Gone is final and says why; who asks for the same instance again gets a new peer. ``down`` says more than gone: that the
peer's worker can't write into our pool any more, nor ours into its, which only our worker knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from ...messages.base import Message
from ...messages.handover import Hello
from ...messages.worker import KVOrder


class PeerState(Enum):
    """Where a peer stands; see the module."""

    FINDING = auto()
    GREETING = auto()
    OPEN = auto()
    GONE = auto()


class Reading(Enum):
    """How far we are in getting KV from a peer; see the module."""

    CLOSED = auto()
    WANTED = auto()
    ADMITTING = auto()
    ADMITTED = auto()
    INVITED = auto()
    READY = auto()


class Writing(Enum):
    """How far we are in giving KV to a peer; see the module."""

    CLOSED = auto()
    WANTED = auto()
    CONNECTING = auto()
    READY = auto()


class Spare(NamedTuple):
    """A connection of the control port, and the Hello that came by it."""

    connection: int
    hello: Hello


@dataclass(slots=True, eq=False)
class Peer:
    """One instance. ``number``: what our worker calls the link to it. ``status`` (HTTP) and ``reason`` are for the
    requests that fail when it is gone.

    ``host`` and ``port``: of the bootstrap server that it was found by; ``same_as``: the peer to use in its place,
    since another address led to the same instance before. ``connection``: in the control port. ``wanted_at``: since
    when its KV is, ``told_at``: when our worker, or it, was told of that last. ``pool``: the digest of what proves that
    somebody is this instance; ``registered``: a bootstrap server has it, too. ``spare``: a connection that it made
    while we dial it, for the case that ours fails. ``invitation``: how our worker reaches its pool.
    """

    state: PeerState
    number: int = 0
    wanted_at: float = 0.0
    told_at: float = 0.0
    host: str = ""
    port: int = 0
    epoch: str = ""
    connection: int | None = None
    hello: Hello | None = None
    pool: str = ""
    registered: bool = False
    spare: Spare | None = None
    invitation: bytes = b""
    heard_at: float = 0.0
    reading: Reading = Reading.CLOSED
    writing: Writing = Writing.CLOSED
    down: bool = True
    status: int = 503
    reason: str = ""
    same_as: Peer | None = None
    unsent: list[Message] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        """Whether it is over."""
        return self.state is PeerState.GONE

    @property
    def readable(self) -> bool:
        """Whether it can be asked for KV."""
        return self.reading is Reading.READY and not self.gone

    @property
    def writable(self) -> bool:
        """Whether it can be given KV."""
        return self.writing is Writing.READY and not self.gone

    @property
    def order(self) -> KVOrder | None:
        """How its pages lie, and arrive here."""
        return self.hello.layout.order if self.hello is not None else None

    def send(self, message: Message) -> None:
        """Queue for the peer; one frame a turn of the loop."""
        self.unsent.append(message)

    def info(self) -> dict[str, Any]:
        """For /server_info."""
        info: dict[str, Any] = {"epoch": self.epoch, "state": self.state.name.lower()}
        if self.host:
            info["bootstrap"] = f"{self.host}:{self.port}"
        return info | {"reading": self.reading.name.lower(), "writing": self.writing.name.lower()}
