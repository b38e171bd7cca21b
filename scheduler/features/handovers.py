"""The hand-overs as a part of the loop: their tick, and the questions about them.

``POST /migrate`` moves a running request, ``GET /transfers`` lists open hand-overs, ``POST /role`` changes the role.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ...messages.control import MAX_TRANSFERS, RoleReq, RoleResult, Transfers, TransfersReq
from ...messages.metrics import Family
from ...messages.moves import MigrateReq, MigrateResult
from ...messages.question import RefusedAnswer
from ...messages.worker import (
    PagesVerified,
    PeerAdmitted,
    PeerConnected,
    PeerFailed,
    PeerLinkDown,
    SendEnded,
    SendProgress,
    TransferEvent,
)
from ..feature import Feature
from ..handlers import answers, receives
from ..handover import Handovers
from ..role import CurrentRole

log = logging.getLogger(__name__)
NO_MIGRATION = "this instance exchanges no KV; start it with --handover on"
ONLY_UNIFIED = "this instance exchanges no KV, so it can only be unified; start it with --handover on"


class HandoverFeature(Feature):
    """The hand-overs of the instance, and the questions about them.

    ``has_freed`` returns whether the last tick freed memory that a hand-over may wait for.
    """

    def __init__(self, handovers: Handovers, role: CurrentRole, has_freed: Callable[[], bool]) -> None:
        self._handovers = handovers
        self._role = role
        self._has_freed = has_freed

    def tick(self, now: float) -> None:
        """Read messages from peers, advance all hand-overs and check their deadlines."""
        self._handovers.poll(now)

    def seconds_left(self, now: float) -> float:
        """Return how many seconds the loop may sleep before hand-overs need it; infinity for no limit.

        It is 0 if a hand-over may get memory that the last tick freed.
        """
        limit = self._handovers.timeout_ms()
        if limit is None:
            return math.inf
        return 0.0 if self._has_freed() else limit / 1000

    def status(self, now: float) -> dict[str, Any]:
        """Return ``disaggregation``: ports, peers and counts of hand-overs; None if this instance exchanges no KV."""
        return {"disaggregation": self._handovers.info()}

    def metrics(self, now: float) -> list[Family]:
        """Return the metrics of hand-overs, migrations and peers; none if this instance exchanges no KV."""
        return self._handovers.metrics()

    def problem(self, now: float) -> str | None:
        """Return why other instances can't find this prefill instance; None if they can, and for other roles."""
        return self._handovers.membership.problem(now)

    def warning(self, now: float) -> str | None:
        """Return that hanging peers keep KV memory of ended hand-overs unusable, or None."""
        return self._handovers.warning(now)

    @answers(TransfersReq)
    def list_transfers(self, question: TransfersReq, now: float) -> Transfers:
        """Return the open hand-overs and migrations, oldest first and at most ``MAX_TRANSFERS``, and their number."""
        rooms = self._handovers.transfers(now)
        rooms.sort(key=lambda room: -room["seconds"])
        return Transfers(len(rooms), rooms[:MAX_TRANSFERS])

    @answers(MigrateReq)
    def migrate(self, question: MigrateReq, now: float) -> MigrateResult | RefusedAnswer | None:
        """Begin to migrate a running request, and return None: the answer is sent when the migration is over.

        Refuse with 409 if this instance exchanges no KV.
        """
        if self._handovers.membership.refusal() is not None:
            return RefusedAnswer(409, NO_MIGRATION)
        self._handovers.migrate(question, now)
        return None

    @answers(RoleReq)
    def change_role(self, question: RoleReq, now: float) -> RoleResult | RefusedAnswer:
        """Change the instance's role, register it anew so that peers learn the role, and return the old and the new
        one.

        Refuse with 409 if this instance exchanges no KV.
        """
        if self._handovers.membership.refusal() is not None:
            return RefusedAnswer(409, ONLY_UNIFIED)
        before, self._role.mode = self._role.mode, question.role
        self._handovers.membership.register()
        log.info("role changed from %s to %s", before, question.role)
        return RoleResult(question.role, before)

    @receives(PeerAdmitted, PeerConnected, PeerFailed, PeerLinkDown, SendProgress, SendEnded, PagesVerified)
    def on_transfer_event(self, event: TransferEvent, now: float) -> None:
        """Pass an event of the worker's transfer engine on to the hand-overs."""
        self._handovers.on_transfer_event(event, now)
