"""The router process: one event loop, from the command line's options to a clean end.

starting ──sockets bound──▶ serving ──SIGTERM──▶ draining ──answers complete, or drain_timeout──▶ exit 0
                               └──────SIGINT, SIGHUP (at once), or a second signal──────────────▶ exit 0

Signals that were ignored at the start stay ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace

import setproctitle
import uvicorn
import uvloop

from ..runtime.exit_codes import EXIT_USAGE
from ..runtime.hardening import harden
from ..runtime.logs import configure_logging
from ..runtime.malloc import return_freed_memory
from ..runtime.rlimits import allow_many_connections
from ..runtime.run_dir import RunDir
from ..runtime.secret_files import warn_of_exposed_files
from ..runtime.signals import STOP, EchoFilter, ignore_stray_signals, unignored
from ..runtime.web.keys import read_keys
from ..runtime.web.own_admin_key import draw_own_admin_key, own_admin_key
from ..runtime.web.ports import http_url, listen
from ..runtime.web.responses.response_files import ResponseFolderError
from ..runtime.web.server import server_config
from .app import make_app
from .members_file import parse_members, read_members
from .options import RouterOptions, RouterOptionsError, parse_prefill

logger = logging.getLogger(__name__)

BACKLOG = 4096
OPTIONS = RouterOptions
FILES_EACH = 3
"""A client's connection, and one to each instance of a pair."""


class RouterServer(uvicorn.Server):
    """uvicorn's server with our signals: an ending that was asked for is exit status 0, not death by signal."""

    failed = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals that end the server while the block runs.

        SIGTERM lets running answers finish. SIGINT, SIGHUP or a second signal end the server at once. Signals that were
        ignored at the start stay ignored.
        """
        loop = asyncio.get_running_loop()
        ignore_stray_signals()
        self._echoes = EchoFilter()
        handled = [STOP, *unignored((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))]
        for number in handled:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self._echoes.is_echo(number) or (number == STOP and self.should_exit):
            return
        if self.should_exit or number in (signal.SIGINT, signal.SIGHUP):
            self.force_exit = True
        else:
            logger.info("finishing the running answers, %s s at most", self.config.timeout_graceful_shutdown)
        self.should_exit = True

    def end_on_fault(self, error: BaseException) -> None:
        """End the server at once with status 1, because a part that it needs has failed with ``error``."""
        logger.critical("the router is broken and ends", exc_info=error)
        self.failed = self.should_exit = self.force_exit = True


def run_router(options: RouterOptions) -> int:
    """Serve until told to end.

    Returns the exit status: 0 after a signal, 1 when the port is taken or after a fault, 2 for bad options.
    """
    harden(allow_dumps=options.allow_core_dumps)
    try:
        options.check()
        if options.members_file is not None:
            parse_members(options.members_file, read_members(options.members_file))
    except RouterOptionsError as exc:
        print(f"pdserve router: {exc}", file=sys.stderr)
        return EXIT_USAGE
    listener, failure = None, ""
    try:
        listener = listen(options.host, options.port, BACKLOG)
        options = replace(options, port=listener.getsockname()[1])
    except OSError as e:
        failure = e.strerror or str(e)
    setproctitle.setproctitle(f"pdserve router:{options.port}")
    configure_logging(f"router:{options.port}", options.log_level, options.log_format, never_blocks=True)
    if listener is None:
        place = f"{options.host}:{options.port}"
        logger.error("can't listen on %s (%s); choose another address with --host and --port", place, failure)
        return 1
    warn_of_exposed_files(options)
    allow_many_connections()
    return_freed_memory()

    def on_fault(error: BaseException) -> None:
        server.end_on_fault(error)

    with own_key(options) as key:
        try:
            app = make_app(options, on_fault, key)
        except ResponseFolderError as e:
            logger.error("%s", e)
            return 1
        config = server_config(
            app,
            options,
            files_each=FILES_EACH,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(options.drain_timeout),
        )
        server = RouterServer(config)
        counts = len(parse_prefill(options.prefill)), len(options.decode), len(options.worker)
        logger.info("%s: %d prefill, %d decode, %d unified", http_url(options.host, options.port), *counts)
        uvloop.run(server.serve(sockets=[listener]))
    return 1 if server.failed else 0


@contextlib.contextmanager
def own_key(options: RouterOptions) -> Iterator[str | None]:
    """Draw an admin key for this router, and yield it. Its file exists until the block ends.

    Yield None, and draw no key, if the options name an admin key or no cluster secret, or if no folder can be made.
    Without the secret, instances would not accept the router's admin requests.
    """
    if options.cluster_secret_file is None or read_keys(options).has_admin:
        yield None
        return
    try:
        run_dir = RunDir()
    except OSError as e:
        logger.warning("no folder for an admin key (%s): there is no admin, unless --admin-key-file names a key", e)
        yield None
        return
    try:
        draw_own_admin_key(options, run_dir.path)
        yield own_admin_key(run_dir.path)
    finally:
        run_dir.remove()
