"""The worker's interface to the engine that moves KV pages between instances.

``disaggregation/transfer/`` implements it, and starts the worker process of an instance that takes part in hand-overs.
"""

from __future__ import annotations

from typing import Protocol

from ..messages.worker import SendPages, TransferCommand
from ..runtime.layers_done import LayersDone


class PageMover(Protocol):
    """The engine that moves pages while steps are computed. Thread-safe; no call waits."""

    @property
    def metadata(self) -> bytes:
        """Metadata that peers need to reach this instance's pools."""
        ...

    def submit(self, command: TransferCommand) -> None:
        """Queue a command."""
        ...

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Push pages as their layers are ``done``. Call ``wake`` when all layers are done."""
        ...

    def wake(self) -> None:
        """Make the engine check at once for something to do."""
        ...


class NoPageMover:
    """The ``PageMover`` of an instance that takes no part in hand-overs: it is asked for nothing."""

    metadata = b""

    def submit(self, command: TransferCommand) -> None:
        """Raise ``RuntimeError``."""
        raise RuntimeError(f"an instance without hand-overs was sent {type(command).__name__}")

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Raise ``RuntimeError``."""
        raise RuntimeError("an instance without hand-overs was asked to push pages")

    def wake(self) -> None:
        """Do nothing."""
