"""A request that goes to another instance with its KV, or the KV of a finished request that goes back to a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from ....mem_cache.base_prefix_cache import KVHold
from ....mem_cache.page_run import PageRun
from ....messages.base import HandoverId
from ....messages.handover import TransferRequest
from ....messages.moves import MigrateReq
from ....scheduler.req import Req
from ..peer import Peer


class MigrationState(Enum):
    """State of a ``Migration``; ``migration_source.py`` draws the transitions."""

    REACHING = auto()
    OFFERED = auto()
    PUSHING = auto()
    LANDING = auto()
    FREEZING = auto()
    COMMITTED = auto()
    DRAINING = auto()


class MigrationOwner(Protocol):
    """The part that starts migrations of one kind, and continues them when their KV has been sent."""

    def on_reached(self, move: Migration, now: float) -> None:
        """Offer the request to its peer, which is connected now."""

    def on_sent(self, move: Migration) -> None:
        """Note that all of the KV offered was sent and has landed at the other instance."""

    def on_ready(self, move: Migration, handover: HandoverId, now: float) -> None:
        """Pause the request here if it still runs: the other instance is ready to continue it.

        ``handover``: the migration's id in messages.
        """

    def on_failed(self, move: Migration, state: MigrationState, reason: str) -> None:
        """Continue without the migration, which has failed for ``reason``. ``state``: its state until then."""

    def on_over(self, move: Migration) -> None:
        """Forget a migration that has ended, with or without success. The worker reads no more of its memory."""


@dataclass(slots=True, eq=False)
class KVPush:
    """The worker's push of a migration's KV, from PUSHING until the worker's ``SendEnded``."""

    asked: TransferRequest
    """The peer's request for the KV."""
    run: PageRun
    """Pages to push."""
    hold: KVHold
    """The request's memory, pinned while it is pushed."""
    landed: int = 0
    """Bytes that have landed, as last reported by the worker."""


class Pause(NamedTuple):
    """The pause of a request in FREEZING and COMMITTED."""

    handover: HandoverId
    since: float


@dataclass(slots=True, eq=False)
class Migration:
    """State of one request, or of a finished request's KV, that goes to ``peer``."""

    owner: MigrationOwner
    req: Req
    host: str
    """Host of the bootstrap address of ``peer``."""
    peer: Peer
    since: float
    deadline: float
    question: MigrateReq | None = None
    """Question to answer. None for a KV return, or if all requests migrate."""
    state: MigrationState = MigrationState.REACHING
    handover: HandoverId | None = None
    """Id of the hand-over. Set in OFFERED."""
    kv_len: int = 0
    """Tokens with KV that is sent ahead, less the prefix that the peer has according to its request."""
    offered: int = 0
    """Number of tokens that were known when the request was offered."""
    hold: KVHold | None = None
    """Memory that is pinned from the beginning to the push. Set for a KV return."""
    push: KVPush | None = None
    """The push. Set while the worker may read the memory."""
    pause: Pause | None = None
    """The request's pause. Set from FREEZING on."""
    abort_asked: bool = False
    """Whether the peer aborted the transfer and waits for an ``AbortAck``."""
    reason: str = ""
    """Why the migration failed. Set in DRAINING."""

    def info(self, now: float) -> dict[str, Any]:
        """Return this migration's entry for ``/transfers``, JSON-ready."""
        return {
            "direction": "moving",
            "room": self.handover.room if self.handover is not None else 0,
            "state": self.state.name.lower(),
            "rid": self.req.rid,
            "peer": self.peer.epoch or None,
            "seconds": round(now - self.since, 3),
            "prompt_tokens": self.req.prompt_len,
            "reason": self.reason or None,
        }
