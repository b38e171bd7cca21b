"""``pdserve up``: a whole cluster on this host.

Lifecycle:

- plan ports, cores and memory;
- start every instance and the router at once;
- wait until each answers /health with 200, within ``startup_timeout``. A death in this phase ends the cluster;
- watch. A process that dies is started again on the same ports, after a pause that doubles. One that dies too often in
  a minute ends the cluster.

After SIGTERM, SIGINT or SIGHUP the router finishes running requests, and then the instances end. A second signal kills
all. All processes die with this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

import httpx
import setproctitle

from ..runtime.cluster_secret import MIN_CHARS, ClusterSecretError, RouterKeys
from ..runtime.exit_codes import EXIT_USAGE
from ..runtime.fork_server import ForkServer, ForkServerFailed
from ..runtime.hardening import harden
from ..runtime.logs import configure_logging
from ..runtime.machine.topology import read_machine
from ..runtime.ranks import WORKER
from ..runtime.signals import STOP, EchoFilter, handle_signals
from ..runtime.web.keys import read_keys
from .child_process import child_environment
from .cluster_options import ClusterOptions, ClusterOptionsError
from .cluster_plan import ClusterPlan, plan_cluster
from .cluster_process import ClusterProcess, ForwardedOutput, LoggedOutput, ProcessOutput
from .log_folder import LogFolder, LogFolderError
from .pinned_model import pin_model
from .supervisor import TOO_FEW_FILES, InstanceFailed, check_address, is_too_few_files

logger = logging.getLogger(__name__)

POLL_INTERVAL = 0.1
"""Seconds between two looks at /health while the cluster starts."""
POLL_TIMEOUT = 2.0
AT_ONCE_SECONDS = 5.0
"""Time in which a process ends its own ones and removes its files, if it need not finish anything."""
KILL_GRACE = 5.0
"""Seconds that a process has beyond ``drain_timeout`` before it is killed."""


class ClusterFailedError(Exception):
    """The cluster can't start or go on; the message says why."""


def _process_output(options: ClusterOptions) -> ProcessOutput:
    if options.log_dir:
        return LoggedOutput(LogFolder(Path(options.log_dir)))
    # An object a line, behind a name, would be none; it says itself which process it comes from.
    return ForwardedOutput(named_lines=options.log_format == "text")


class Cluster:
    """Supervises the processes of a cluster on this host. ``run`` starts, watches and stops them."""

    def __init__(self, options: ClusterOptions, plan: ClusterPlan) -> None:
        self._options = options
        output = _process_output(options)
        self._instances = [ClusterProcess(p, output) for p in plan.instances]
        self._router = ClusterProcess(plan.router, output)
        self._all = [*self._instances, self._router]
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._echoes = EchoFilter()
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> int:
        """Start all processes, restart those that die, and stop them after a signal or a failure. Return the exit code.

        It is 0 after a signal. It is 1 if the cluster did not start, or a process died too often.
        """
        self._install_signals()
        failure = ""
        try:
            self._start_all()
            self._wait_until_ready()
            if not self._signals:
                print(self.summary(), flush=True)
            while not self._signals:
                self._watch_once()
        except ClusterFailedError as exc:
            failure = str(exc)
        finally:
            self._stop(drain=not failure)
        # Said last, so that it is what a log's reader sees first.
        if failure:
            logger.error("%s", failure)
            return 1
        logger.info("stopped")
        return 0

    def _install_signals(self) -> None:
        self._wake_write.setblocking(False)
        self._wake_read.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        handle_signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._echoes.is_echo(number):
            return
        self._signals = max(self._signals, 1) if number == STOP else self._signals + 1

    def _start_all(self) -> None:
        """Start all processes. One fork server does so for those that can be forked."""
        forked = [process for process in self._all if process.plan.fork_order is not None]
        for process in self._all:
            if process not in forked:
                self._start(process)
        if forked:
            modules = tuple(dict.fromkeys(module for process in forked for module in process.plan.modules))
            try:
                # What workers need in their environment is there. The orders of other processes have what those need.
                fork_server = ForkServer.spawn(modules, child_environment(WORKER))
            except OSError as exc:
                raise ClusterFailedError(f"no process can be started: {describe(exc)}") from exc
            with closing(fork_server):
                for process in forked:
                    self._start(process, fork_server)

    def _start(self, process: ClusterProcess, fork_server: ForkServer | None = None) -> None:
        try:
            process.start(fork_server)
        except (OSError, ForkServerFailed) as exc:
            raise ClusterFailedError(f"{process.plan.name} can't be started: {describe(exc)}") from exc
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _turn(self, timeout: float | None) -> list[tuple[ClusterProcess, str]]:
        """Wait up to ``timeout`` seconds for a signal or a death; return the processes that ended, and how each did.

        None waits without limit. ``restart_at`` of each is set, but none is restarted here.
        """
        ended = []
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._wake_read.recv(64)
                continue
            process: ClusterProcess = key.data
            self._selector.unregister(process.pidfd)
            ended.append((process, process.take_end()))
        return ended

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._options.startup_timeout
        # Plain HTTP only: without ``verify=False``, the client would load all certificates of the system.
        with httpx.Client(timeout=POLL_TIMEOUT, trust_env=False, verify=False) as client:
            while waiting := [p for p in self._all if p.ready_after is None]:
                for process, how in self._turn(POLL_INTERVAL):
                    raise ClusterFailedError(f"{process.plan.name} {how} while the cluster was starting")
                if self._signals:
                    return
                if time.monotonic() > deadline:
                    names = ", ".join(p.plan.name for p in waiting)
                    raise ClusterFailedError(
                        f"not ready after {self._options.startup_timeout:.0f} s: {names}; "
                        f"raise --startup-timeout if loading takes long"
                    )
                for process in waiting:
                    if answers(client, process.plan.url):
                        process.ready_after = time.monotonic() - process.started
                        logger.info("%s is ready after %.1f s", process.plan.name, process.ready_after)

    def _watch_once(self) -> None:
        """Wait until a process dies, a restart is due or a signal comes. Carry out the due restarts.

        Raises ``ClusterFailedError`` if a process has died too often within a minute.
        """
        planned = [p.restart_at for p in self._all if p.restart_at is not None]
        timeout = max(0.0, min(planned) - time.monotonic()) if planned else None
        for process, how in self._turn(timeout):
            if process.deaths > self._options.max_restarts:
                raise ClusterFailedError(
                    f"{process.plan.name} {how}, for the {ordinal(process.deaths)} time in a minute"
                )
            logger.error("%s %s: it is started again", process.plan.name, how)
        for process in self._all:
            if process.restart_at is not None and process.restart_at <= time.monotonic() and not self._signals:
                self._start(process)

    def _stop(self, *, drain: bool) -> None:
        """End every process. With ``drain``, end the router first, so that running answers can still be finished.

        Otherwise all end at once, within ``KILL_GRACE`` seconds.
        """
        if drain:
            logger.info("stopping (%.0f s at most; a second signal doesn't wait)", self._options.drain_timeout)
            self._end([self._router], self._options.drain_timeout + KILL_GRACE)
            self._end(self._instances, self._options.drain_timeout + KILL_GRACE)
        else:
            self._end(self._all, KILL_GRACE)

    def _end(self, processes: Iterable[ClusterProcess], grace: float) -> None:
        """Send ``STOP`` and wait up to ``grace`` seconds for the end.

        After a second signal, tell them to end at once, for which they have ``AT_ONCE_SECONDS``. Kill what still runs
        then.
        """
        left = [p for p in processes if p.running]
        for process in left:
            process.send(STOP)
        self._wait_for_end(left, grace, lambda: self._signals < 2)
        if self._signals >= 2:
            for process in left:
                process.send(signal.SIGINT)
            self._wait_for_end(left, AT_ONCE_SECONDS, lambda: True)
        for process in left:
            if process.running:
                self._selector.unregister(process.pidfd)
                process.kill()

    def _wait_for_end(self, left: Sequence[ClusterProcess], seconds: float, goes_on: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while any(p.running for p in left) and time.monotonic() < deadline and goes_on():
            self._turn(max(0.0, deadline - time.monotonic()))

    def summary(self) -> str:
        """Return the text shown when the cluster is ready: addresses, start times, admin key files, example commands.

        Asks each process for its start times over HTTP.
        """
        url, options = self._router.plan.url, self._options
        keys = read_keys(options)
        own_key = next(iter((*keys.users.values(), *keys.unnamed)), None)
        key = ' -H @<(echo "Authorization: Bearer $API_KEY")' if own_key else ""
        shell = " in bash or zsh" if own_key else ""
        body = '{"text": "The capital of France is", "sampling_params": {"max_new_tokens": 32}, "stream": true}'
        lines = [f"\n{options.model_name} is served on {url}\n"]
        headers = {"authorization": f"Bearer {own_key}"} if own_key else {}
        with httpx.Client(timeout=POLL_TIMEOUT, trust_env=False, verify=False, headers=headers) as client:
            for process in self._all:
                ready = f"ready after {process.ready_after:5.1f} s"
                parts = ", ".join(f"{k} {v:.1f}" for k, v in load_seconds(client, process.plan.url).items())
                line = f"  {process.plan.name:<11} {process.plan.url:<24} {ready}"
                lines.append(f"{line} ({parts})" if parts else line)
        drawn = ((process.plan.name, process.own_admin_key_file) for process in self._all)
        if files := [f"  {name:<11} {file}" for name, file in drawn if file is not None]:
            lines.append("\nNo --admin-key-file: orders that end or change these processes need the keys in\n")
            lines += files
        chat = f"pdserve chat --url {url}" + (" --api-key-file FILE" if own_key else "")
        lines.append(
            f"\nTry it{shell}:\n\n  curl -N {url}/generate{key} -d '{body}'\n  {chat}\n\nCtrl-C stops everything.\n"
        )
        return "\n".join(lines)


def answers(client: httpx.Client, url: str) -> bool:
    """Return whether ``GET /health`` at the base URL ``url`` has status 200; False if the server can't be reached."""
    try:
        return client.get(url + "/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def load_seconds(client: httpx.Client, url: str) -> dict[str, float]:
    """Return how many seconds each phase of an instance's start took; phases under 0.05 s are left out.

    The result is empty if the instance does not answer or does not report them.
    """
    try:
        response = client.get(url + "/server_info")
        reported = response.json().get("load_seconds", {}) if response.is_success else {}
    except (httpx.TransportError, ValueError):
        return {}
    return {part: seconds for part, seconds in reported.items() if seconds >= 0.05}


def describe(error: Exception) -> str:
    """Describe in words why something can't be started."""
    return TOO_FEW_FILES if is_too_few_files(error) else str(error)


def ordinal(number: int) -> str:
    """Format a number as 1st, 2nd, 3rd, 4th…"""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def run_cluster(options: ClusterOptions) -> int:
    """Run ``pdserve up``: start a cluster, and supervise it until it is told to stop. Return the exit code.

    It is ``EXIT_USAGE`` for options that can't work, 1 for a failure, and 0 after a signal.
    """
    harden(allow_dumps=options.allow_core_dumps)
    setproctitle.setproctitle(f"pdserve up:{options.port}")
    configure_logging("up", options.log_level, options.log_format, never_blocks=True)
    with contextlib.ExitStack() as stack:
        try:
            options.check()
            options = pin_model(options)
            if options.cluster_secret_file is None:
                secret = stack.enter_context(private_file("cluster-secret", secrets.token_urlsafe(MIN_CHARS)))
                options = replace(options, cluster_secret_file=secret)
            router_keys = RouterKeys.read(options.cluster_secret_file)
            assert router_keys is not None
            router_key_file = stack.enter_context(private_file("router-key", router_keys.text()))
            plan = plan_cluster(options, read_machine(), router_key_file)
            logger.info("cores: %s", plan.cores)
            if options.port:
                check_address(options.host, options.port, "--port")
            cluster = Cluster(options, plan)
        except (ClusterOptionsError, ClusterSecretError, LogFolderError) as exc:
            print(f"pdserve up: {exc}", file=sys.stderr)
            return EXIT_USAGE
        except (InstanceFailed, OSError) as exc:
            logger.error("%s", describe(exc))
            return 1
        return cluster.run()


@contextlib.contextmanager
def private_file(name: str, text: str) -> Iterator[str]:
    """Write ``text`` to an unnamed file in memory (memfd), and yield the file's path, valid within the ``with`` block.

    Only this process, and children that inherit the file's descriptor, can open the path. Folders for temporary files
    would not do: other programs clean them up while the cluster runs.
    """
    with open(os.memfd_create(name), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
