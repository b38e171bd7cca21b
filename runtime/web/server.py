"""uvicorn as a child process of an instance runs it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn


class ChildServer(uvicorn.Server):
    """Says when it serves, and leaves signals alone: Ctrl-C is the supervisor's to act on, SIGTERM its user's."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve on ``sockets``."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield
