"""The two sides of a transfer, as each way of moving bytes has them in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ...mem_cache.kv_pages.region import KVRegion
from ...messages.base import I32
from ...messages.worker import SliceChecksum

HOST = "127.0.0.1"
LIMIT_SECONDS = 60.0
"""How long one request may take, or an answer: beyond it, something hangs."""


class Pools(NamedTuple):
    """What every process maps: the writer's pool and the owner's, both of ``num_pages``."""

    source: KVRegion
    destination: KVRegion
    page_bytes: int
    num_pages: int


class SideFailed(Exception):
    """A side can't do what it is asked; the message says what happened."""


class Moving(NamedTuple):
    """One request: the seconds that it took, and the checksums where some were computed."""

    seconds: float
    slices: Sequence[SliceChecksum] = ()


class Side:
    """Either of them. Every method may raise ``SideFailed``."""

    def verify(self, pages: I32, slices: Sequence[SliceChecksum]) -> float:
        """Check ``pages`` of the destination against the checksums ``slices``, and return the seconds that it took.

        Raises ``SideFailed`` if they differ, and by default always.
        """
        raise SideFailed("nothing is verified here")


class Owner(Side):
    """A side with the pool that is written to.

    ``means``: what the writer needs to know of it. ``look_seconds``: how often its library has to be polled now, None
    if not at all.
    """

    means: bytes
    look_seconds: float | None = None

    def look(self) -> None:
        """Let the transfer library process what has arrived. By default do nothing."""

    def grant(self, pages: I32) -> None:
        """Allow writes to ``pages`` and to no others. By default do nothing.

        Without pages, an owner that polls its library stops doing so: another contestant is measured then.
        """


class Writer(Side, ABC):
    """Side that writes pages into the pool of the other one."""

    def connect(self, means: bytes) -> None:
        """Connect to the owner. ``means``: how to reach it. By default do nothing."""

    @abstractmethod
    def move(self, src: I32, dst: I32, *, hashed: bool) -> Moving:
        """Copy pages ``src`` to pages ``dst`` of the owner; every byte has arrived when this returns.

        ``hashed``: whether to compute checksums meanwhile.
        """
