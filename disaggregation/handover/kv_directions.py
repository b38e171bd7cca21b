"""Opening the two directions of KV between this instance and a peer, step by step; ``peer.py`` draws the states."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...messages.decode import shown
from ...messages.handover import Invite, Welcome
from ...messages.worker import AdmitPeer, ConnectPeer, PeerCommand
from ..bootstrap.finder import REACH_SECONDS
from .control.port import ControlPort
from .peer import Peer, PeerState, Reading, Writing

log = logging.getLogger(__name__)

WORKER_SECONDS = 30.0
"""Time limit in seconds for the workers to open a link. The worker's own limits are shorter."""


class KVDirections:
    """The steps that open a direction: commands to this instance's worker, and messages to the peer.

    ``metadata``: metadata that peers' workers need to reach this instance's pools.
    """

    def __init__(self, metadata: bytes, port: ControlPort, to_worker: Callable[[PeerCommand], None]) -> None:
        self._metadata = metadata
        self._port = port
        self._to_worker = to_worker

    def want(self, peer: Peer, now: float) -> None:
        """Have the direction opened in which the peer sends KV here; ``advance`` takes the steps.

        Do nothing if it is open or being opened.
        """
        if peer.reading is Reading.CLOSED:
            peer.reading, peer.wanted_at = Reading.WANTED, now

    def advance(self, peer: Peer, now: float, *, is_last_down: bool) -> str | None:
        """Take the next step in opening the directions that are wanted, if one can be taken now.

        Return why the peer is to be given up if a time limit is over, otherwise None. ``is_last_down``: whether the
        previous link to the instance is down. Before that nothing is opened.
        """
        if peer.state is not PeerState.OPEN:
            return None
        if not is_last_down:
            if peer.reading is Reading.WANTED and now - peer.wanted_at > REACH_SECONDS:
                return "the last link to it is not down: it still holds this instance's KV memory"
            return None
        if peer.reading is Reading.WANTED:
            # The worker refuses writes of a peer that it lost before, so it has to admit the peer again first.
            peer.reading = Reading.ADMITTING
            self._tell(peer, AdmitPeer(peer.epoch, peer.number), now)
        if peer.reading is Reading.ADMITTED and peer.connection is not None:
            peer.reading, peer.last_step_at = Reading.INVITED, now
            self._port.take_long_frames(peer.connection)
            peer.send(Invite(peer.epoch, self._metadata))
        if peer.writing is Writing.WANTED:
            peer.writing = Writing.CONNECTING
            self._tell(peer, ConnectPeer(peer.epoch, peer.number, peer.invitation), now)
        waiting = peer.reading in (Reading.ADMITTING, Reading.INVITED) or peer.writing is Writing.CONNECTING
        if waiting and now - peer.last_step_at > WORKER_SECONDS:
            return f"the workers did not open a link within {WORKER_SECONDS:.0f} s"
        return None

    def _tell(self, peer: Peer, command: AdmitPeer | ConnectPeer, now: float) -> None:
        peer.last_step_at, peer.down = now, False
        self._to_worker(command)

    def on_admitted(self, peer: Peer) -> bool:
        """Note that the worker accepts writes of the peer. Return whether ``advance`` can take a step now."""
        if peer.reading is not Reading.ADMITTING:
            return False
        peer.reading = Reading.ADMITTED
        return True

    def on_connected(self, peer: Peer) -> None:
        """Note that the worker has connected to the peer's pools, and tell the peer, which may now ask for KV."""
        if peer.writing is Writing.CONNECTING:
            peer.writing = Writing.READY
            self._welcome(peer)
            log.info("KV can be sent to instance %s", shown(peer.epoch))

    def on_message(self, peer: Peer, message: Invite | Welcome) -> bool:
        """Handle the peer's message about opening a direction. Return whether ``advance`` can take a step now.

        An ``Invite`` asks this instance to connect to the peer's pools. A ``Welcome`` says that the peer has connected
        to this instance's.
        """
        if isinstance(message, Invite) and peer.writing is Writing.CLOSED:
            peer.writing, peer.invitation = Writing.WANTED, message.metadata
            return True
        if isinstance(message, Invite) and peer.writing is Writing.READY:
            self._welcome(peer)
        elif isinstance(message, Welcome) and peer.reading is Reading.INVITED:
            peer.reading = Reading.READY
            log.info("KV can be had from instance %s", shown(peer.epoch))
        return False

    def _welcome(self, peer: Peer) -> None:
        if peer.connection is not None:
            self._port.send_long_frames(peer.connection)
        peer.send(Welcome(peer.epoch))
