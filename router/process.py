"""The router process: one event loop, from the command line's options to a clean end.

starting ──sockets bound──▶ serving ──SIGTERM──▶ draining ──answers complete, or drain_timeout──▶ exit 0
                               └──────SIGINT (at once), or a second signal──────────────────────▶ exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator

import setproctitle
import uvicorn
import uvloop

from ..runtime.logs import configure_logging
from ..runtime.malloc import return_freed_memory
from ..runtime.open_files import allow_many_connections
from ..runtime.web.server import server_config
from .app import make_app
from .options import RouterOptions, RouterOptionsError, parse_prefill

logger = logging.getLogger(__name__)

BACKLOG = 4096
EXIT_USAGE = 2


class RouterServer(uvicorn.Server):
    """uvicorn's server with our signals: an ending that was asked for is exit status 0, not death by signal."""

    failed = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while serving."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.should_exit or number == signal.SIGINT:
            self.force_exit = True
        else:
            logger.info("SIGTERM: finishing the running answers, %s s at most", self.config.timeout_graceful_shutdown)
        self.should_exit = True

    def end_on_fault(self, error: BaseException) -> None:
        """End with status 1: a part of the router that nothing works without has failed."""
        logger.critical("the router is broken and ends", exc_info=error)
        self.failed = self.should_exit = self.force_exit = True


def run_router(options: RouterOptions) -> int:
    """Serve until told to end.

    Returns the exit status: 0 after a signal, 1 when the port is taken or after a fault, 2 for bad options.
    """
    try:
        options.check()
    except RouterOptionsError as exc:
        print(f"pdserve router: {exc}", file=sys.stderr)
        return EXIT_USAGE
    setproctitle.setproctitle(f"pdserve router:{options.port}")
    configure_logging(f"router:{options.port}", options.log_level, options.log_format)
    allow_many_connections()
    return_freed_memory()

    def on_fault(error: BaseException) -> None:
        server.end_on_fault(error)

    config = server_config(
        make_app(options, on_fault),
        options,
        host=options.host,
        port=options.port,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(options.drain_timeout),
    )
    server = RouterServer(config)
    counts = len(parse_prefill(options.prefill)), len(options.decode), len(options.worker)
    logger.info("http://%s:%d: %d prefill, %d decode, %d unified", options.host, options.port, *counts)
    uvloop.run(serve(server))
    return 1 if server.failed else 0


async def serve(server: RouterServer) -> None:
    """``Server.serve``; a port that is taken ends it by ``SystemExit`` after the reason was logged."""
    try:
        await server.serve()
    except SystemExit:
        server.failed = True
