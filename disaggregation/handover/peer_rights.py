"""The messages of hand-overs and migrations that a peer may send."""

from __future__ import annotations

from typing import Any

from ...messages.handover import ToSender
from ...messages.moves import MoveCommit, MoveOffer, MoveReady, MoveRefused, MoveTaken
from .peer import Peer


class PeerRights:
    """The rights of peers at the instance ``epoch``. ``takes_moves``: whether it takes requests that migrate."""

    def __init__(self, epoch: str, *, takes_moves: bool) -> None:
        self.takes_moves = takes_moves
        self._epoch = epoch

    def may_send(self, peer: Peer, message: Any) -> bool:
        """Return whether the peer may send ``message`` now. False for any message that names no hand-over.

        A hand-over is named by its receiver's epoch, so only the receiver may send a receiver's messages. Messages of
        transfers also require that the direction of KV is open.
        """
        if not hasattr(message, "handover"):
            return False
        if isinstance(message, MoveOffer | MoveCommit):
            return self.takes_moves and bool(message.handover.epoch == self._epoch)
        if isinstance(message, MoveReady | MoveTaken):
            return bool(message.handover.epoch == peer.epoch)
        if isinstance(message, MoveRefused):
            return True
        if isinstance(message, ToSender):
            return peer.writable and bool(message.handover.epoch == peer.epoch)
        return peer.readable and bool(message.handover.epoch == self._epoch)
