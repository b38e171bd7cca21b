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
        """Opaque bytes that peers need to reach this instance's KV pools; b"" without hand-overs."""
        ...

    def submit(self, command: TransferCommand) -> None:
        """Queue a command for the engine's thread, which answers by events later."""
        ...

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Queue a push of pages to a peer, layer by layer as ``done`` counts them.

        Call ``wake`` when all layers are counted.
        """
        ...

    def wake(self) -> None:
        """Make the engine's thread check at once for something to do, as ``done`` counters give no signal."""
        ...


class NoPageMover:
    """The ``PageMover`` of an instance that takes no part in hand-overs: it is asked for nothing."""

    metadata = b""

    def submit(self, command: TransferCommand) -> None:
        """Raise ``RuntimeError``: an instance without hand-overs gets no transfer commands."""
        raise RuntimeError(f"an instance without hand-overs was sent {type(command).__name__}")

    def push(self, command: SendPages, done: LayersDone) -> None:
        """Raise ``RuntimeError``: an instance without hand-overs has no peer to push to."""
        raise RuntimeError("an instance without hand-overs was asked to push pages")

    def wake(self) -> None:
        """Do nothing: there is no engine to wake."""
