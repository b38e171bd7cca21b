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
        """Return a handle by which another process can map the memory at ``address``, valid until it is freed.

        Raises ``RegionError`` for memory that no other process may map.
        """
        ...

    def why_not(self, device: bytes) -> str:
        """Return why this device can't write the memory of the device named ``device`` (perhaps itself), or "" if it
        can.
        """
        ...

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process by its handle, and return its address in this process. Raises
        ``LinkLost``.
        """
        ...

    def shut(self, address: int) -> None:
        """Unmap the allocation at ``address``, which ``open`` returned. Raises ``LinkLost``."""
        ...

    def copy(self, pieces: Sequence[DeviceCopy]) -> Any:
        """Queue the copies ``pieces`` on the device, and return a ticket for ``is_done``. Raises ``LinkLost``."""
        ...

    def is_done(self, ticket: Any) -> bool:
        """Return whether the copies of ``ticket`` are complete, every byte visible to any reader; never wait.

        The ticket is not valid any more after True. Raises ``LinkLost`` if a copy failed.
        """
        ...

    def close(self) -> None:
        """Release the driver's own objects on the device, such as its stream. This may wait."""
        ...
