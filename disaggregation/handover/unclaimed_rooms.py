"""Rooms opened by a decode without a client's request yet, and tombstones of rooms that ended before both sides came.

Messages of peers create both, so both are bounded.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .failure import Failure

PEER_ROOMS = 4096
"""Maximum open rooms of one peer without a client's request.

The two requests of a hand-over arrive within milliseconds, so an honest peer has few such rooms.
"""
ALL_ROOMS = 4 * PEER_ROOMS
"""Maximum open rooms of all peers without a client's request."""
ALL_BYTES = 64 << 20
"""Maximum bytes of page numbers that are kept for such rooms of all peers."""
MAX_TOMBSTONES = 16384
"""Maximum number of tombstones. The oldest is dropped first."""
TOMBSTONE_SECONDS = 60.0
"""Lifetime of a tombstone, in seconds."""


class UnclaimedRooms:
    """Counts of rooms and bytes of page numbers, by peer."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, dict[int, int]] = {}
        self._count = 0
        self._bytes = 0

    def admit(self, peer: Hashable, room: int, nbytes: int) -> str | None:
        """Count a room that the decode ``peer`` has opened and that no client's request has come for, and return None.

        ``nbytes``: bytes of page numbers to add to those counted for the room. If that exceeds a limit of the peer or
        of all peers, count nothing and return the reason.
        """
        rooms = self._rooms.get(peer, {})
        more = 0 if room in rooms else 1
        if len(rooms) + more > PEER_ROOMS:
            return f"this decode instance has {PEER_ROOMS} rooms open here that no request has come for"
        if self._count + more > ALL_ROOMS:
            return f"{ALL_ROOMS} rooms are open here that no request has come for"
        if self._bytes + nbytes > ALL_BYTES:
            return f"{ALL_BYTES >> 20} MiB of page numbers wait here for requests that have not come"
        self._rooms.setdefault(peer, rooms)[room] = rooms.get(room, 0) + nbytes
        self._count += more
        self._bytes += nbytes
        return None

    def drop(self, peer: Hashable, room: int) -> None:
        """Stop counting ``room`` and its bytes: its client's request has come, or it has ended.

        Do nothing if it isn't counted.
        """
        rooms = self._rooms.get(peer)
        if rooms is None or room not in rooms:
            return
        self._count -= 1
        self._bytes -= rooms.pop(room)
        if not rooms:
            del self._rooms[peer]

    def __len__(self) -> int:
        return self._count


class _Tombstone(NamedTuple):
    until: float
    failure: Failure


class Tombstones:
    """Failures of rooms, kept for ``TOMBSTONE_SECONDS`` for the side that comes late."""

    def __init__(self) -> None:
        self._graves: dict[int, _Tombstone] = {}

    def add(self, room: int, failure: Failure, now: float) -> None:
        """Remember for a minute why ``room`` ended, and forget the oldest record above ``MAX_TOMBSTONES``."""
        self._graves.pop(room, None)  # so that the order stays that of expiry
        self._graves[room] = _Tombstone(now + TOMBSTONE_SECONDS, failure)
        if len(self._graves) > MAX_TOMBSTONES:
            del self._graves[next(iter(self._graves))]

    def take(self, room: int) -> Failure | None:
        """Remove and return the failure of ``room``, or None if none is remembered."""
        grave = self._graves.pop(room, None)
        return grave.failure if grave is not None else None

    def expire(self, now: float) -> None:
        """Forget the rooms that have been remembered for ``TOMBSTONE_SECONDS`` at ``now``."""
        while self._graves:
            room, grave = next(iter(self._graves.items()))
            if now <= grave.until:
                return
            del self._graves[room]

    def __len__(self) -> int:
        return len(self._graves)

    def __contains__(self, room: int) -> bool:
        return room in self._graves
