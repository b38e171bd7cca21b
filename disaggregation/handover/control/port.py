"""An instance's control port: accepts and dials connections, reads them in rotation, and bounds the cost of each one.

    accepted → stranger → (a good Hello: ``keep``) peer → ended
      dialled → connecting, in the background ─────▶ peer → ended

After both greetings it does not matter which side dialled. Connections are not redialled. After one breaks, another
instance may listen at the address, so the peer must be found through the bootstrap server again.

A stranger has ``STRANGER_SECONDS`` and ``STRANGER_BYTES`` for its Hello. One more than ``MAX_STRANGERS`` ends the one
that has waited longest. The owner limits the number of peers. A peer may send short frames until the owner permits long
ones. ``take_ended`` reports the end of each peer's connection once. The end of a stranger's is not reported.

To wait for this port, wait for ``fileno``. It is readable, level-triggered, while anything is left to do.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ....messages.base import Message
from ....messages.decode import Codec, UndeclaredMessage
from ....messages.peer import PeerMessage
from ....runtime.refusal_log import RefusalLog
from ....runtime.web.ports import listen
from ...errors import LinkLost, ProtocolBroken
from ...wire import tcp_socket
from ...wire.listener import BACKLOG, Listener
from ...wire.reactor import Reactor
from .connection import ControlConnection
from .connection_cipher import Cipher, make_cipher
from .frames import FRAME_MESSAGES, LONG_FRAME_BYTES, MESSAGES_A_TURN, SHORT_FRAME_BYTES, make_frames

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Maximum number of accepted connections without a valid Hello."""
STRANGER_SECONDS = 5.0
"""Time limit in seconds for a stranger's Hello."""
STRANGER_BYTES = 16 << 10
"""Maximum frame size of a stranger, in bytes: three times the longest Hello."""
STRANGER_UNREAD_BYTES = 64 << 10
"""Send-buffer limit of a stranger, in bytes."""
UNREAD_BYTES = 2 * LONG_FRAME_BYTES
"""Send-buffer limit of a peer, in bytes."""
UNREAD_BYTES_IN_ALL = 4 * UNREAD_BYTES
"""Limit of all peers' send buffers. Beyond it, the peer that has read nothing for the longest time is ended."""
SILENCE_SECONDS = 10.0
"""TCP user timeout in seconds: the time that sent bytes may stay unacknowledged."""
DIAL_SECONDS = 5.0
"""Time limit in seconds for the peer's greeting after dialling."""
SERVE_BYTES = 64 << 10
"""Maximum bytes read from one connection before the others are read."""
SERVE_COST = 4096
"""Bytes charged for each read of a connection, so that connections that send single bytes use up the tick, too."""
TURN_BYTES = 16 << 20
"""Maximum bytes read per tick."""
AGAIN_A_ROUND = 64
"""Maximum number of repeated reads per round, before new connections are accepted."""
ACCEPTS_AT_ONCE = MAX_STRANGERS // 2
"""Maximum connections accepted at once, so that each is read before later ones displace it."""


class Ended(NamedTuple):
    """Report of a peer's connection that has ended."""

    identity: int
    reason: str


class _Accepted(ControlConnection):
    """An accepted connection.

    ``deadline``: latest time of a stranger's Hello. ``sends``: maximum frame size that the peer accepts, in bytes.
    """

    def __init__(self, sock: socket.socket, reactor: Reactor, cipher: Cipher, identity: int) -> None:
        super().__init__(sock, reactor, cipher, STRANGER_BYTES, STRANGER_UNREAD_BYTES)
        self.identity = identity
        self.deadline = time.monotonic() + STRANGER_SECONDS
        self.sends = SHORT_FRAME_BYTES

    def why(self, end: LinkLost) -> str:
        """Return the reason for the end of this connection, for error messages: the text of ``end``."""
        return str(end)


class _Dialled(_Accepted):
    """A dialled connection, which is a peer's from the beginning. ``deadline``: latest time of the peer's greeting."""

    def __init__(self, sock: socket.socket, reactor: Reactor, cipher: Cipher, identity: int, place: str) -> None:
        super().__init__(sock, reactor, cipher, identity)
        self.frame_limit, self.send_limit = SHORT_FRAME_BYTES, UNREAD_BYTES
        self.deadline = time.monotonic() + DIAL_SECONDS
        self._place = place

    def why(self, end: LinkLost) -> str:
        if not self.greeted:
            return f"its control port at {self._place} can't be used: {end}"
        if isinstance(end, ProtocolBroken):
            return f"the instance at {self._place} broke the protocol: {end}"
        if self.cipher.unanswered:
            return (
                f"it hung up at {self._place} before it said Hello; its log says why (another --cluster-secret-file?)"
            )
        return "it closed the connection or died"


class ControlPort:
    """Listener, strangers and peers of a control port. Raises ``OSError`` if it can't listen on ``host``.

    ``port`` 0 takes a free one. ``keys``: keys of the cluster secret (``connection_cipher.py``).
    """

    def __init__(self, host: str, port: int = 0, keys: Sequence[bytes] = ()) -> None:
        self._keys = list(keys)
        self.refusals = RefusalLog(log, "at the control port")
        self._reactor = Reactor()
        self._listener = Listener(listen(host, port, BACKLOG), self._reactor, self.refusals)
        self.port = int(self._listener.sock.getsockname()[1])
        self._codec: Codec[Any] = Codec(PeerMessage, LONG_FRAME_BYTES, FRAME_MESSAGES)
        self._strangers: dict[int, _Accepted] = {}
        self._peers: dict[int, _Accepted] = {}
        self._ready: deque[tuple[_Accepted | Listener, bool, bool]] = deque()
        self._left = TURN_BYTES
        self._again = 0
        self._ended: list[Ended] = []
        self._last_identity = 0

    @property
    def is_sealed(self) -> bool:
        """Whether the port has a cluster secret, which every connected instance must have then."""
        return bool(self._keys)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to do."""
        return self._reactor.fileno()

    def dial(self, address: str, port: int) -> int:
        """Begin to connect to a control port, and return a number for the connection. Messages sent meanwhile are
        queued.

        A failure is reported later by ``take_ended``. ``address`` must be an IP address, because resolving a name could
        block. Raises ``ValueError`` for anything else, and ``OSError`` if connecting fails at once.
        """
        sock = socket.socket(tcp_socket.address_family(address), socket.SOCK_STREAM)
        self._last_identity += 1
        try:
            tcp_socket.tune(sock, SILENCE_SECONDS)
            tcp_socket.start_connecting(sock, address, port)
            place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            cipher = make_cipher(self._keys, dialled=True)
            connection = _Dialled(sock, self._reactor, cipher, self._last_identity, place)
        except OSError:
            sock.close()
            raise
        self._peers[connection.identity] = connection
        return connection.identity

    def recv(self) -> tuple[int, list[Any]] | None:
        """Return the messages of the next frame, with the number of its connection; None if there is no frame.

        It is also None if this tick has read ``TURN_BYTES``. One frame of each connection is read before the second of
        any. Data that comes meanwhile makes ``fileno`` readable again. Raises ``UndeclaredMessage``.
        """
        if not self._ready:
            self._begin_round()
        while self._ready and self._left > 0:
            source, readable, writable = self._ready.popleft()
            self._left -= SERVE_COST
            if isinstance(source, Listener):
                self._accept()
            elif not source.closed:
                frame = self._serve(source, readable, writable)
                if frame is not None:
                    return source.identity, self._codec.decode(frame)
        self._left = TURN_BYTES
        return None

    def send(self, identity: int, messages: Sequence[Message]) -> list[Message]:
        """Send messages to the connection ``identity``, and return those that are too long for a frame, which are not
        sent.

        What the peer does not read yet is queued. Messages to a connection that has ended are dropped.
        """
        connection = self._peers.get(identity) or self._strangers.get(identity)
        if connection is None:
            return []
        frames, too_long = make_frames(messages, connection.sends)
        if frames:
            try:
                connection.send(frames)
            except LinkLost as e:
                self._end(connection, e)
            if connection.unsent:
                self._limit_unread()
        return too_long

    def keep(self, identity: int) -> None:
        """Make an accepted connection a peer's, because its Hello is valid.

        It then has no deadline, and may send longer frames. ``identity``: the connection's number. If the connection
        has ended already, ``take_ended`` reports that.
        """
        connection = self._strangers.pop(identity, None)
        if connection is not None:
            connection.frame_limit, connection.send_limit = SHORT_FRAME_BYTES, UNREAD_BYTES
            self._peers[identity] = connection
        elif identity not in self._peers:
            self._ended.append(Ended(identity, "its connection ended before"))

    def take_long_frames(self, identity: int) -> None:
        """Accept frames of up to ``LONG_FRAME_BYTES`` from a peer: it is asked for messages that may need them."""
        if identity in self._peers:
            self._peers[identity].frame_limit = LONG_FRAME_BYTES

    def send_long_frames(self, identity: int) -> None:
        """Send frames of up to ``LONG_FRAME_BYTES`` to a peer, which accepts them."""
        if identity in self._peers:
            self._peers[identity].sends = LONG_FRAME_BYTES

    def drop(self, identity: int) -> None:
        """Close a connection. Data sent before is still delivered. ``take_ended`` does not report this end."""
        connection = self._peers.get(identity) or self._strangers.get(identity)
        if connection is not None:
            self._close(connection)

    def take_ended(self) -> list[Ended]:
        """Return the peers' connections that have ended since the last call, with reasons. Their frames have all been
        read.
        """
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in [*self._strangers.values(), *self._peers.values()]:
            self._close(connection)
        self._listener.close()
        self._reactor.close()

    @property
    def connections(self) -> int:
        """Number of open connections, of peers and of senders without a valid Hello."""
        return len(self._strangers) + len(self._peers)

    def _begin_round(self) -> None:
        now = time.monotonic()
        self._listener.check(now)
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if oldest.deadline > now:
                break
            self._end(oldest, ProtocolBroken(f"no good Hello came from it within {STRANGER_SECONDS:g} s"))
        for connection in list(self._peers.values()):
            if isinstance(connection, _Dialled) and not connection.greeted and connection.deadline < now:
                self._end(connection, LinkLost(f"it does not answer (for {DIAL_SECONDS:g} s)"))
        self._again = AGAIN_A_ROUND
        ready = self._reactor.wait(0)
        # Existing connections come before new ones: a new one may displace a stranger with a Hello that waits.
        self._ready.extend(entry for entry in ready if not isinstance(entry[0], Listener))
        self._ready.extend(entry for entry in ready if isinstance(entry[0], Listener))

    def _serve(self, connection: _Accepted, readable: bool, writable: bool) -> bytes | None:
        if writable:
            connection.flush()
        if not readable:
            return None
        try:
            frame, nbytes = connection.read(SERVE_BYTES)
        except LinkLost as e:
            self._end(connection, e)
            return None
        self._left -= nbytes
        if frame is not None and self._again > 0:
            # It may have more data. A repeated read, after all others, is cheaper than another round of polling.
            self._again -= 1
            self._ready.append((connection, True, False))
        return frame

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            sock = self._listener.accept()
            if sock is None:
                return
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers.values()))
                self._end(oldest, ProtocolBroken(f"{MAX_STRANGERS} others have yet to say Hello"))
            self._last_identity += 1
            try:
                tcp_socket.tune(sock, SILENCE_SECONDS)
                cipher = make_cipher(self._keys, dialled=False)
                connection = _Accepted(sock, self._reactor, cipher, self._last_identity)
            except OSError as e:  # a connection that was reset already can't be set up
                self.refusals.add(f"refused a connection: {e}")
                sock.close()
                continue
            self._strangers[connection.identity] = connection
            connection.flush()

    def _limit_unread(self) -> None:
        """Close the connections of the slowest peers until all send buffers have ``UNREAD_BYTES_IN_ALL`` or less
        together.

        Many peers could each stay below their own limit.
        """
        while sum(peer.unsent for peer in self._peers.values()) > UNREAD_BYTES_IN_ALL:
            stuck = min((p for p in self._peers.values() if p.unsent), key=lambda p: p.stream.last_progress)
            self._end(stuck, ProtocolBroken(f"it reads too slowly: {stuck.unsent} bytes wait for it"))

    def _end(self, connection: _Accepted, why: LinkLost) -> None:
        if connection.identity in self._peers:
            self._ended.append(Ended(connection.identity, connection.why(why)))
        if isinstance(why, ProtocolBroken):
            self.refusals.add(f"ended the connection from {_whence(connection.stream.sock)}: {why}")
        self._close(connection)

    def _close(self, connection: _Accepted) -> None:
        connection.close()
        self._strangers.pop(connection.identity, None)
        self._peers.pop(connection.identity, None)


def _whence(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # the connection is gone already
        return "an unknown address"


def read_messages(port: ControlPort) -> Iterator[tuple[int, Any]]:
    """Yield received messages, each with the number of its connection, until none is left or this tick has read enough.

    That is about ``MESSAGES_A_TURN`` messages. Frames with undeclared messages are logged and skipped.
    """
    left = MESSAGES_A_TURN
    while left > 0:
        try:
            frame = port.recv()
        except UndeclaredMessage as e:
            port.refusals.add(str(e))
            left -= 1
            continue
        if frame is None:
            return
        identity, messages = frame
        left -= max(1, len(messages))
        for message in messages:
            yield identity, message
