"""What ``cuda_ipc`` asks of a GPU's driver: memory that another process may map, and copies to what was mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Export(NamedTuple):
    """An allocation of this process's, as another one opens it. ``offset``: of what was exported in it, in bytes."""

    handle: bytes
    offset: int


class DeviceCopy(NamedTuple):
    """``nbytes`` from ``source`` to ``target``: addresses on devices, as this process has them."""

    target: int
    source: int
    nbytes: int


class IpcDriver(Protocol):
    """One device, as one thread uses it. Nothing but ``close`` waits."""

    @property
    def device(self) -> bytes:
        """A name of the device that is the same in every process of this host."""
        ...

    def export(self, address: int, nbytes: int) -> Export:
        """Export memory of the device until it is freed.

        Raises ``RegionError`` for memory that no other process may open.
        """
        ...

    def why_not(self, device: bytes) -> str:
        """Return why this device can't write the memory of ``device`` (perhaps its own), or "" if it can."""
        ...

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process's; returns its address here. Raises ``LinkLost``."""
        ...

    def shut(self, address: int) -> None:
        """Unmap what ``open`` gave. Raises ``LinkLost``."""
        ...

    def copy(self, pieces: Sequence[DeviceCopy]) -> Any:
        """Queue copies; returns what ``is_done`` is asked with, until it says yes. Raises ``LinkLost``."""
        ...

    def is_done(self, ticket: Any) -> bool:
        """Return whether every byte of the copies is visible to any reader. Raises ``LinkLost``."""
        ...

    def close(self) -> None:
        """Give up what this has made."""
        ...
