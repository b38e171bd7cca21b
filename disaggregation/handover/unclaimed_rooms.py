"""Rooms that a decode knows of and no client's request has come for yet, and rooms that are over before both legs came.

Both are opened by messages of peers, so both are bounded: whatever a peer sends, this much is kept of it and no more.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

PEER_ROOMS = 4096
"""Rooms without a request that one peer may have open: a legs' race lasts milliseconds, so an honest one has few."""
ALL_ROOMS = 4 * PEER_ROOMS
ALL_BYTES = 64 << 20
"""Page numbers kept for such rooms, of all peers."""
MAX_TOMBSTONES = 16384
TOMBSTONE_SECONDS = 60.0


class UnclaimedRooms:
    """Counts rooms and bytes by peer."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, dict[int, int]] = {}
        self._count = 0
        self._bytes = 0

    def admit(self, peer: Hashable, room: int, nbytes: int) -> str | None:
        """Count ``room`` of ``peer`` with ``nbytes`` of page numbers; the reason where it is one too many."""
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
        """A request has come for ``room``, or it is over. Harmless for one that isn't counted."""
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
    reason: str


class Tombstones:
    """Why rooms ended, for the leg that comes late: ``TOMBSTONE_SECONDS`` long, the oldest making room for new ones."""

    def __init__(self) -> None:
        self._graves: dict[int, _Tombstone] = {}

    def add(self, room: int, reason: str, now: float) -> None:
        """``room`` is over."""
        self._graves.pop(room, None)  # so that the order stays that of expiry
        self._graves[room] = _Tombstone(now + TOMBSTONE_SECONDS, reason)
        if len(self._graves) > MAX_TOMBSTONES:
            del self._graves[next(iter(self._graves))]

    def take(self, room: int) -> str | None:
        """Why ``room`` is over, once; None where it isn't."""
        grave = self._graves.pop(room, None)
        return grave.reason if grave is not None else None

    def expire(self, now: float) -> None:
        """Forget what is old."""
        while self._graves:
            room, grave = next(iter(self._graves.items()))
            if now <= grave.until:
                return
            del self._graves[room]

    def __len__(self) -> int:
        return len(self._graves)

    def __contains__(self, room: int) -> bool:
        return room in self._graves
