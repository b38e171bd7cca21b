"""Control connections of a world: what ``ControlPort`` is to ``Peers``, without sockets."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdserve.disaggregation.handover.control.frames import FRAME_MESSAGES, LONG_FRAME_BYTES
from pdserve.disaggregation.handover.control.port import Ended
from pdserve.messages.base import Message
from pdserve.messages.channel import encode
from pdserve.messages.decode import Codec
from pdserve.messages.handover import Heartbeat
from pdserve.messages.outputs import Timing
from pdserve.messages.peer import PeerMessage
from pdserve.runtime.refusal_log import RefusalLog
from support.world.world import World

log = logging.getLogger(__name__)
CODEC: Codec[Any] = Codec(PeerMessage, LONG_FRAME_BYTES, FRAME_MESSAGES)


def _without_times(message: Message) -> Message:
    """Return the message without durations, which decide nothing."""
    return msgspec.structs.replace(message, timing=Timing()) if hasattr(message, "timing") else message


class End:
    """One end of a connection. ``kept``: its owner counts it as a peer's."""

    def __init__(self, port: SimPort, identity: int, *, kept: bool) -> None:
        self.port = port
        self.identity = identity
        self.kept = kept
        self.open = True


class Connection:
    """From the one that dialled to the other, which has no end before it has accepted."""

    def __init__(self, world: World, dialler: SimPort) -> None:
        self.number = world.number()
        self.ends: list[End | None] = [End(dialler, world.number(), kept=True), None]
        self._world = world

    def channel(self, side: int) -> tuple[str, int, int]:
        """Return the channel for what goes out from the end of ``side``."""
        return "control", self.number, side

    def post(self, side: int, what: str, act: Callable[[], None], content: bytes = b"") -> None:
        """Send something from the end of ``side`` to the other."""
        self._world.post(self.channel(side), what, act, content)

    def end(self, side: int, reason: str) -> None:
        """Report to the end of ``side`` that the connection is over."""
        end = self.ends[side]
        if end is not None:
            end.port.on_end(end, reason)


class SimPort:
    """See the module. ``on_ready``: something is there to be read; ``port`` and ``address`` are where it listens."""

    is_sealed = False

    def __init__(self, world: World, address: str, on_ready: Callable[[], None]) -> None:
        self.refusals = RefusalLog(log, "at the control port", logging.DEBUG, lambda: world.now)
        self.address = address
        self.port = 10_000 + world.number()
        self.alive = True
        self._world = world
        self._on_ready = on_ready
        self._connections: dict[int, tuple[Connection, int]] = {}
        self._inbox: deque[tuple[int, list[Any]]] = deque()
        self._ended: list[Ended] = []
        world.listening[address, self.port] = self

    # --- what Peers calls ---

    def dial(self, address: str, port: int) -> int:
        """See ``ControlPort``."""
        connection = Connection(self._world, self)
        end = connection.ends[0]
        assert end is not None
        self._connections[end.identity] = connection, 0
        connection.post(0, f"{self.port} dials {port}", lambda: self._arrive(connection, (address, port)))
        return end.identity

    def recv(self) -> tuple[int, list[Any]] | None:
        """See ``ControlPort``."""
        return self._inbox.popleft() if self._inbox else None

    def send(self, identity: int, messages: Sequence[Message]) -> list[Message]:
        """See ``ControlPort``; nothing is too long."""
        if identity in self._connections and messages:
            connection, side = self._connections[identity]
            frame = encode(messages)
            names = " ".join(type(m).__name__ for m in messages if not isinstance(m, Heartbeat))
            what = f"{self.port} says {names or 'Heartbeat'}"
            content = encode([_without_times(m) for m in messages])
            connection.post(side, what, lambda: self._deliver(connection, 1 - side, frame), content)
        return []

    def keep(self, identity: int) -> None:
        """See ``ControlPort``."""
        if identity in self._connections:
            connection, side = self._connections[identity]
            end = connection.ends[side]
            assert end is not None
            end.kept = True
        else:
            self._ended.append(Ended(identity, "its connection ended before"))

    def take_long_frames(self, identity: int) -> None:
        """See ``ControlPort``."""

    def send_long_frames(self, identity: int) -> None:
        """See ``ControlPort``."""

    def drop(self, identity: int) -> None:
        """See ``ControlPort``."""
        if identity in self._connections:
            self._close(*self._connections[identity])

    def take_ended(self) -> list[Ended]:
        """See ``ControlPort``."""
        ended, self._ended = self._ended, []
        return ended

    # --- what the world does ---

    def on_end(self, end: End, reason: str) -> None:
        """Handle the end of a connection: the other end has closed it, or what carried it broke."""
        if end.open and self.alive:
            end.open = False
            del self._connections[end.identity]
            if end.kept:
                self._ended.append(Ended(end.identity, reason))
            self._on_ready()

    def die(self) -> None:
        """Kill the process. The world may cut what it has sent anywhere."""
        for connection, side in list(self._connections.values()):
            self._close(connection, side)
        self.alive = False
        self._world.listening.pop((self.address, self.port), None)

    @property
    def connections(self) -> list[tuple[Connection, int]]:
        """Return the open connections, each with the side that belongs to this port."""
        return list(self._connections.values())

    def _close(self, connection: Connection, side: int) -> None:
        end = connection.ends[side]
        assert end is not None
        end.open = False
        del self._connections[end.identity]
        connection.post(side, f"{self.port} hangs up", lambda: connection.end(1 - side, "it closed the connection"))

    def _arrive(self, connection: Connection, place: tuple[str, int]) -> None:
        target = self._world.listening.get(place)
        if target is None:
            connection.post(1, "connection refused", lambda: connection.end(0, "its control port refused"))
        else:
            target.accept(connection)

    def accept(self, connection: Connection) -> None:
        """Accept a connection of a peer."""
        end = connection.ends[1] = End(self, self._world.number(), kept=False)
        self._connections[end.identity] = connection, 1

    def _deliver(self, connection: Connection, side: int, frame: bytes) -> None:
        end = connection.ends[side]
        if end is not None and end.open and end.port.alive:
            end.port.take(end.identity, frame)

    def take(self, identity: int, frame: bytes) -> None:
        """Receive a frame."""
        self._inbox.append((identity, CODEC.decode(frame)))
        self._on_ready()
