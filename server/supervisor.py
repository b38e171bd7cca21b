"""The supervisor: starts the processes of one instance, watches them, and takes the instance down as one.

Lifecycle: check that the ports are free → start all children at once → wait for each one's ``Ready`` within
``startup_timeout`` → watch.

- The death of any child ends the instance with exit code 1. HTTP gets ``FAILED``, and ends its open requests with
  ``instance_failed``. The other children get ``STOP``. Those that live after ``FAILURE_GRACE`` are killed. The last log
  line names the child and how it died.
- SIGTERM drains. The scheduler admits no more requests, and sends ``Drained`` when its last one has ended, or
  ``drain_timeout`` passes. Then the children are stopped, and the exit code is 0.
- SIGINT stops without draining.

Children ask the kernel to die with this process (``child.die_with_parent``). So even ``kill -9`` of it leaves nothing
behind.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec
import setproctitle
import zmq

from ..messages.channel import Receiver, Sender, UndeclaredMessage, ipc_address
from ..messages.control import Drain, Drained, Ready, StopAsked
from ..messages.routes import ToSupervisor
from ..runtime.child import ChildSpec
from ..runtime.cluster_secret import addresses, inherited_descriptors
from ..runtime.fork_server import ForkServer
from ..runtime.hardening import harden
from ..runtime.logs import configure_logging
from ..runtime.output import copy_to_stderr
from ..runtime.ranks import is_worker
from ..runtime.run_dir import RunDir
from ..runtime.secret_files import warn_of_exposed_files
from ..runtime.signals import FAILED, STOP, EchoFilter, handle_signals
from ..runtime.web.own_admin_key import draw_own_admin_key
from ..runtime.web.ports import check_port_free, hold_free_port, http_url
from .child_process import Child, Start, StartFailed, start_processes
from .options import ServerOptions
from .process_table import process_modules

log = logging.getLogger(__name__)

STOP_GRACE = 3.0
"""Seconds between ``STOP`` and SIGKILL for a child in an orderly stop."""

FAILURE_GRACE = 0.5
"""Seconds between ``STOP`` and SIGKILL after a failure: enough for HTTP to send errors to its clients."""

DRAIN_LOOK_SECONDS = 0.5
"""Maximum seconds between two reads of the inbox during a drain."""

PIPE_BYTES = 1 << 20
"""Size of the pipe for the children's output. Linux allows every user 1 MiB."""

LAST_WORDS_SECONDS = 1.0
"""Maximum seconds to copy the children's last output. A grandchild may hold the pipe open without limit."""


TOO_FEW_FILES = "this process may not open enough files: raise ulimit -n to 1024 or more"


class InstanceFailed(Exception):
    """The instance can't start or go on; the message says why."""


@dataclass
class Supervisor:
    """Starts, watches and stops the processes of an instance; ``run`` does all three.

    ``modules``: module to run for a process, by the process's name, instead of the default one. ``fork_server`` starts
    the processes; None: a new one does.
    """

    options: ServerOptions
    modules: Mapping[str, str] | None = None
    fork_server: ForkServer | None = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._own_dir = RunDir()
        self.run_dir = self._own_dir.path
        self.children: list[Child] = []
        self._ctx: zmq.Context[Any] = zmq.Context()
        self._inbox: Receiver[Any] = Receiver(self._ctx, ipc_address(self.run_dir, "supervisor"), ToSupervisor)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._inbox.socket.getsockopt(zmq.FD), selectors.EVENT_READ, None)
        self._signalled: signal.Signals | None = None
        self._echoes = EchoFilter()
        self._drained = False
        self._drain_to = sorted(addresses("--drain-to", self.options.drain_to))
        self._signal_read, self._signal_write = socket.socketpair()
        self._copier: threading.Thread | None = None
        self._own_key_file: Path | None = None

    def run(self) -> int:
        """Start the instance's processes, watch them until a signal or a death, and stop them. Return the exit code.

        It is 0 after a signal, and 1 if the start failed or a process died. SIGTERM drains first.
        """
        self._install_signals()
        failure, code, grace = "", 0, STOP_GRACE
        try:
            if self._answers:
                check_address(self.options.host, self.options.port, "--port")
                self._own_key_file = draw_own_admin_key(self.options, self.run_dir)
            self._start_children()
            self._wait_until_ready()
            if self._signalled is None:
                self._watch()
            if self._signalled is signal.SIGTERM and all(c.ready for c in self.children):
                self._drain() if self._answers else self._wait_for_the_first_host()
        except InstanceFailed as e:
            failure, code, grace = str(e), 1, FAILURE_GRACE
        finally:
            self._stop_children(grace, FAILED if failure else STOP)
            self._inbox.close()
            # The children are gone: nothing that is still queued has a reader.
            self._ctx.destroy(linger=0)
            self._own_dir.remove()
        # Said last, so that it is what a log's reader sees first.
        if code:
            log.error("%s", failure)
        else:
            log.info("stopped")
        return code

    @property
    def _answers(self) -> bool:
        """Whether this host answers requests: of an instance on several hosts, only the first one does."""
        return not self.options.node_rank

    def _install_signals(self) -> None:
        self._signal_write.setblocking(False)
        signal.set_wakeup_fd(self._signal_write.fileno())
        self._selector.register(self._signal_read, selectors.EVENT_READ, None)
        handle_signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == STOP:
            self._signalled = self._signalled or signal.SIGTERM
            return
        if self._echoes.is_echo(number):
            return
        # SIGTERM asks for a drain; a second signal, or Ctrl-C, wants out at once.
        first = self._signalled is None and number == signal.SIGTERM
        self._signalled = signal.SIGTERM if first else signal.SIGINT

    def _start_children(self) -> None:
        """Start all child processes, and a thread that copies their output to standard error.

        So no child waits for a reader of the log.
        """
        read, write = os.pipe()
        with suppress(OSError):  # the user may have too many large pipes already
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with os.fdopen(write, "wb") as output:
            self._copier = threading.Thread(target=copy_to_stderr, args=(os.fdopen(read, "rb", 0),), daemon=True)
            self._copier.start()
            self._start_each(output)

    def _start_each(self, output: IO[bytes]) -> None:
        starts = []
        for name, module in (self.modules or process_modules(self.options)).items():
            # Workers have no use for keys, and are not kept from others of this user (``hardening``).
            options = replace(self.options, api_key=None) if is_worker(name) else self.options
            spec = ChildSpec(name, str(self.run_dir), self.epoch, os.getpid(), options, self.secret)
            spec_path = self.run_dir / f"{name}.json"
            spec_path.touch(0o600)  # before anything is in it
            spec_path.write_bytes(msgspec.json.encode(spec))
            starts.append(Start(name, module, spec_path))
        descriptors = inherited_descriptors(self.options.cluster_secret_file)
        try:
            for child in start_processes(starts, output, descriptors, self.options.startup_timeout, self.fork_server):
                self._selector.register(child.pidfd, selectors.EVENT_READ, child)
                self.children.append(child)
        except StartFailed as e:
            raise InstanceFailed(str(e)) from e

    def _wait_until_ready(self) -> None:
        deadline = self.started + self.options.startup_timeout
        while not all(c.ready for c in self.children):
            if self._signalled is not None:
                return
            if time.monotonic() > deadline:
                missing = ", ".join(c.name for c in self.children if not c.ready)
                limit = self.options.startup_timeout
                raise InstanceFailed(
                    f"not ready after {limit:.0f} s: {missing}; raise --startup-timeout if loading takes long"
                )
            self._turn(deadline - time.monotonic())
        options, seconds = self.options, time.monotonic() - self.started
        if self._answers:
            log.info(
                "ready after %.1f s: %s instance on %s serves %s%s",
                seconds,
                options.disaggregation_mode,
                http_url(options.host, options.port),
                options.model_name,
                f"; the admin's key is in {self._own_key_file}" if self._own_key_file else "",
            )
        else:
            log.info(
                "ready after %.1f s: computes a part of %s, with %s",
                seconds,
                options.model_name,
                options.dist_init_addr,
            )

    def _watch(self) -> None:
        while self._signalled is None:
            self._turn(None)

    def _drain(self) -> None:
        scheduler = Sender(self._ctx, ipc_address(self.run_dir, "scheduler"))
        try:
            scheduler.send(Drain(self._drain_to))
            deadline = time.monotonic() + self.options.drain_timeout
            log.info("draining (at most %.0f s; a second signal stops at once)", self.options.drain_timeout)
            while not self._drained and self._signalled is signal.SIGTERM and time.monotonic() < deadline:
                self._turn(min(DRAIN_LOOK_SECONDS, deadline - time.monotonic()))
        finally:
            scheduler.close()
        log.log(
            logging.INFO if self._drained else logging.WARNING, "drained" if self._drained else "requests are cut off"
        )

    def _wait_for_the_first_host(self) -> None:
        """Keep this host's ranks running while the first host drains, which needs them to finish its requests.

        Return when a rank ends, after ``drain_timeout`` seconds, or at a second signal.
        """
        deadline = time.monotonic() + self.options.drain_timeout
        log.info("the first host may drain (at most %.0f s; a second signal stops at once)", self.options.drain_timeout)
        try:
            while self._signalled is signal.SIGTERM and time.monotonic() < deadline:
                self._turn(min(DRAIN_LOOK_SECONDS, deadline - time.monotonic()))
        except InstanceFailed as e:
            log.info("%s", e)

    def _turn(self, timeout: float | None) -> None:
        """Wait up to ``timeout`` seconds for a message, a signal or a death, and handle messages. None: no limit.

        Raises ``InstanceFailed`` if a child has died.
        """
        # ZMQ's descriptor is edge-triggered: what came in since the last look must be read before sleeping.
        self._read_inbox()
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._signal_read:
                self._signal_read.recv(64)
            elif key.data is not None:
                child: Child = key.data
                raise InstanceFailed(f"process {child.name} {describe_exit(child.process.wait())}; the instance stops")
        self._read_inbox()

    def _read_inbox(self) -> None:
        while True:
            try:
                messages = self._inbox.recv(0)
            except UndeclaredMessage as e:
                log.error("%s", e)
                continue
            if not messages:
                return
            for message in messages:
                if isinstance(message, Drained):
                    self._drained = True
                elif isinstance(message, StopAsked):
                    self._drain_to = message.to or self._drain_to
                    self._signalled = self._signalled or signal.SIGTERM
                elif isinstance(message, Ready):
                    self._on_ready(message)

    def _on_ready(self, message: Ready) -> None:
        for child in self.children:
            if child.name == message.name:
                child.ready = True
        detail = ", ".join(f"{k} {v:.1f} s" for k, v in message.info.items())
        log.info(
            "%s is ready after %.1f s%s",
            message.name,
            time.monotonic() - self.started,
            f" ({detail})" if detail else "",
        )

    def _stop_children(self, grace: float, tell_http: int) -> None:
        living = [c for c in reversed(self.children) if c.process.poll() is None]
        for child in living:
            child.process.send_signal(tell_http if child.name == "http" else STOP)
        deadline = time.monotonic() + grace
        for child in living:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        for child in self.children:
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
        if self._copier is not None:
            self._copier.join(LAST_WORDS_SECONDS)


def is_too_few_files(error: Exception) -> bool:
    """Return whether the limit of open files was reached, of this process or of the host."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def describe_exit(code: int) -> str:
    """Describe in words how a process with this exit code ended. A negative ``code`` is the signal that killed it."""
    if code < 0:
        known = -code in set(signal.Signals)
        return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"ended with exit code {code}"


def check_address(host: str, port: int, flag: str) -> None:
    """Raise ``InstanceFailed`` if no server could listen on ``host``:``port`` now. ``flag``: the port's option.

    This fails early, before a model is loaded.
    """
    try:
        check_port_free(host, port)
    except OSError as e:
        raise InstanceFailed(f"can't listen on {host}:{port} ({e.strerror}); choose another address with {flag}") from e


def take_free_ports(options: ServerOptions) -> tuple[ServerOptions, list[socket.socket]]:
    """Replace the ports 0 of the API and the bootstrap server by free ones. Return the new options and sockets.

    The sockets reserve the ports until they are closed. Raises ``InstanceFailed``.
    """
    held: dict[str, socket.socket] = {}
    try:
        if options.port == 0 and options.node_rank == 0:
            held["port"] = hold_free_port(options.host)
        if options.disaggregation_bootstrap_port == 0:
            held["disaggregation_bootstrap_port"] = hold_free_port(options.host)
    except OSError as e:
        for sock in held.values():
            sock.close()
        raise InstanceFailed(f"can't listen on {options.host} ({e.strerror or e}); choose another --host") from e
    ports: dict[str, Any] = {name: sock.getsockname()[1] for name, sock in held.items()}
    return replace(options, **ports), list(held.values())


def run_server(
    options: ServerOptions,
    prepare: Callable[[ServerOptions], ServerOptions] = lambda given: given,
    fork_server: ForkServer | None = None,
) -> int:
    """Run ``pdserve server``: one instance, until it is told to stop. Return the exit code.

    ``prepare`` completes the options once for all children, such as with the model's commit. It may raise
    ``InstanceFailed``. ``fork_server`` starts the processes; None: a new one does.
    """
    harden(allow_dumps=options.allow_core_dumps)
    held: list[socket.socket] = []
    failure = ""
    try:
        options, held = take_free_ports(options)
    except InstanceFailed as e:
        failure = str(e)
    process = f"{options.disaggregation_mode}:{options.port} supervisor"
    setproctitle.setproctitle(f"pdserve {process}")
    configure_logging(process, options.log_level, options.log_format, never_blocks=True)
    if failure:
        log.error("%s", failure)
        return 1
    warn_of_exposed_files(options)
    try:
        return Supervisor(prepare(options), fork_server=fork_server).run()
    except InstanceFailed as e:
        log.error("%s", e)
        return 1
    except OSError as e:
        if not is_too_few_files(e):
            raise
        log.error("%s", TOO_FEW_FILES)
        return 1
    finally:
        for sock in held:
            sock.close()
