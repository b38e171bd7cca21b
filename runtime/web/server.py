"""uvicorn as routers and instances run it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from .connections import Connections
from .limited_protocol import limited_protocol


class ConnectionOptions(Protocol):
    """The options of a server that limit its clients' connections."""

    @property
    def send_timeout(self) -> float: ...
    @property
    def keep_alive_timeout(self) -> float: ...


def server_config(app: ASGIApp, options: ConnectionOptions, *, files_each: int = 1, **settings: Any) -> uvicorn.Config:
    """Make the uvicorn settings that router and instance share, with further ``settings`` of uvicorn's.

    ``files_each``: number of files that a connection takes, including those opened to serve it.
    """
    return uvicorn.Config(
        app,
        http=limited_protocol(options.send_timeout, Connections.of_process(files_each)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # It believes headers from loopback addresses: AccessLog reads them from --trusted-proxies alone.
        proxy_headers=False,
        timeout_keep_alive=cast(int, options.keep_alive_timeout),  # it takes any number of seconds
        **settings,
    )


class ChildServer(uvicorn.Server):
    """Says when it serves, and leaves signals alone: Ctrl-C is the supervisor's to act on, SIGTERM its user's."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve on ``sockets``, and then call ``on_started``."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the process's signal handlers stay as they are."""
        yield
