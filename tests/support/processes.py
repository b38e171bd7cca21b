"""Real servers for the end-to-end tests: started on free ports, watched, always ended."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

from pdserve.runtime.python import python_command

from .admin_key import ADMIN_KEY, as_admin
from .forked import COMMAND, Forked, forks
from .hostile_folder import hostile_folder
from .machine import limit
from .orphans import end_with_this_process
from .surroundings import is_unchanged

STARTUP_SECONDS = 90.0
STOP_SECONDS = 15.0
ANSWER_SECONDS = 60.0
ONE_THREAD = ("--threads", "1")
"""Option for one compute thread.

Two test files run at a time. Threads that wait for each other at every layer's barriers, on cores that others use as
well, take many times as long as one thread.
"""
DEFAULTS = {
    "server": {
        # Tests of handovers want them, even if the decode would have computed the prompt sooner.
        "--disaggregation-threshold": "always",
        # A process that gets no core for a second is not dead. Tests of silence set limits of their own.
        "--disaggregation-heartbeat-timeout": "30",
        "--drain-timeout": "200",
    },
    "up": {"--disaggregation-threshold": "always", "--disaggregation-heartbeat-timeout": "30"},
    "router": {"--connect-timeout": "20", "--health-check-timeout": "30", "--hang-timeout": "60"},
}
"""Options of the commands that tests start, unless a test gives others."""
# A connection for each request: one that is kept can be closed by the server just when the client uses it again.
NO_REUSE = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, each given once.

    Until a server listens there, nothing else may. They are below those that the system gives to connecting sockets.
    Each worker of xdist has its own, from a random one on.
    """
    return list(itertools.islice(filter(is_free, _own_ports), count))


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port."""
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def own_ports(first: int = 10_000, workers: int = 16) -> Iterator[int]:
    """Yield the ports of this process, over and over."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    size = (max(lowest_given, 32_768) - first) // workers
    first += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % workers * size
    begin = random.randrange(size)
    return (first + (begin + i) % size for i in itertools.count())


_own_ports = own_ports()


def wait_until(condition: Callable[[], object], seconds: float, what: str, *, every: float = 0.02) -> None:
    """Poll until ``condition()`` is true; an AssertionError that names ``what`` after ``limit(seconds)``.

    ``every``: seconds between two looks; a request costs some milliseconds of the cores that are waited for.
    """
    deadline = time.monotonic() + limit(seconds)
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit(seconds):.0f} s: {what}"
        time.sleep(every)


def freeze(pid: int) -> None:
    """Stop a process by SIGSTOP, until SIGCONT, and return when every thread of it stands still.

    The signal alone is not enough: one thread takes it and stops the others. On a busy machine that is milliseconds
    later, in which another thread still answers.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_is_stopped(thread) for thread in threads.iterdir()), 30, "every thread stands still")


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended


@dataclass
class Launched:
    """One ``pdserve`` command and its log.

    ``groups``: control groups that it runs in. ``python``: interpreter with the ``pdserve`` to run. ``env``: its whole
    environment. ``host``: where it is asked. ``enter``: a command that runs the one given after it, somewhere else.
    """

    args: list[str]
    port: int
    log_path: Path
    groups: Sequence[Path] = ()
    python: str = sys.executable
    env: Mapping[str, str] | None = None
    host: str = "127.0.0.1"
    enter: Sequence[str] = ()
    process: subprocess.Popen[bytes] | Forked | None = None
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            timeout=limit(ANSWER_SECONDS), limits=NO_REUSE, trust_env=False, auth=as_admin()
        )
    )

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Launch; doesn't wait."""
        args = [*self.args, *self._admin_args(), *self._open_args()]
        with self.log_path.open("ab") as log:
            if self._can_be_forked():
                self.process = forks().start(COMMAND, args, log.fileno())
            else:
                self.process = self._spawn(args, log)
        end_with_this_process(self.process.pid)

    def _can_be_forked(self) -> bool:
        """Return whether the command can be a fork: it has this interpreter, environment and control group."""
        is_plain = self.python == sys.executable and not self.groups and not self.enter
        return is_plain and self.args[0] in ("server", "router") and is_unchanged(self.env)

    def _spawn(self, args: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        argv = [*self.enter, *python_command("-m", "pdserve.server.cli", *args, python=self.python)]
        if self.groups:
            enter = "".join(f'echo $$ > "{group}/cgroup.procs" && ' for group in self.groups)
            argv = ["sh", "-c", f'{enter} exec "$@"', "sh", *argv]
        folder = hostile_folder()
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=folder.environment(self.env), cwd=folder.path
        )

    def _admin_args(self) -> list[str]:
        """Return options with one admin key for all instances, so that a router without keys can pass it on.

        Nothing else changes by it.
        """
        if self.args[0] == "router" or any(arg.startswith(("--api-key", "--admin-key")) for arg in self.args):
            return []
        file = self.log_path.with_name("admin-key")
        if not file.exists():
            file.touch(0o600)
            file.write_text(ADMIN_KEY)
        return ["--admin-key-file", str(file), "--cache-by-key=false"]

    def _open_args(self) -> list[str]:
        """Return the flag for networks of the tests' own, which need no keys."""
        return ["--no-keys"] if "--host" in self.args else []

    def is_healthy(self) -> bool:
        """Return whether /health answers 200. Fails the test if the process has died."""
        assert self.process is not None
        assert self.process.poll() is None, f"died while starting:\n{self.log()}"
        try:
            return self.client.get(self.url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_healthy(self, seconds: float = STARTUP_SECONDS) -> None:
        """Wait for /health."""
        wait_until(self.is_healthy, seconds, f"{self.args} healthy; log:\n{self.log()}", every=0.1)

    def log(self) -> str:
        """Return the output of the process."""
        return self.log_path.read_text(errors="replace")

    def info(self) -> dict:
        """Return the answer of /server_info."""
        return self.client.get(self.url + "/server_info").raise_for_status().json()

    def post(self, path: str, body: dict, seconds: float = ANSWER_SECONDS) -> httpx.Response:
        """POST JSON. ``seconds``: within which an idle machine answers."""
        return self.client.post(self.url + path, json=body, timeout=limit(seconds))

    def generate(self, **body) -> dict:
        """Return the answer of /generate, which must succeed."""
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def family(self) -> dict[str, psutil.Process]:
        """Living processes of the instance by their short name; the root is "supervisor"."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        names = {"supervisor": root}
        for child in root.children(recursive=True):
            names[child.cmdline()[0].split()[-1]] = child
        return names

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; returns the exit code."""
        assert self.process is not None
        assert hostile_folder().imported() == []
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(limit(STOP_SECONDS))
        except subprocess.TimeoutExpired:
            for process in self.family().values():
                process.send_signal(signal.SIGUSR2)  # the log shows where each one hangs
            time.sleep(1)
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not stop:\n{self.log()}") from None


@contextmanager
def launched(tmp: Path, name: str, *args: str, port: int | None = None, **surroundings) -> Iterator[Launched]:
    """Run ``pdserve ARGS --port …`` for the duration of the block; ``surroundings``: see ``Launched``.

    Options that ``args`` don't name get the values of ``DEFAULTS``.
    """
    port = port or free_ports(1)[0]
    for option, value in DEFAULTS.get(args[0], {}).items():
        if option not in args:
            args += (option, value)
    server = Launched([*args, "--port", str(port)], port, tmp / f"{name}.log", **surroundings)
    server.start()
    try:
        yield server
    finally:
        assert server.process is not None
        if server.process.poll() is None:
            server.stop()
        server.client.close()


@dataclass
class Pair:
    """A prefill, a decode, and a router before them."""

    prefill: Launched
    decode: Launched
    router: Launched

    def assert_all_returned(self) -> None:
        """Assert that nothing is in use on either instance, and that their own checks agree."""

        def idle() -> bool:
            reported = [server.info() for server in (self.prefill, self.decode)]
            return all(
                info["requests"]["total"] == info["pool"]["in_use"] == info["invariants_steps_ago"] == 0
                and not info["pool"].get("window_in_use")
                for info in reported
            )

        wait_until(idle, 15, "both instances idle with no slot in use")
        for server in (self.prefill, self.decode):
            info = server.info()
            assert info["pool"]["rows_in_use"] == 0
            assert info["disaggregation"]["sent"]["rooms"] == info["disaggregation"]["received"]["rooms"] == 0
            assert info["invariants"] == "ok"


@contextmanager
def pd_pair(
    tmp: Path,
    backend: str,
    *args: str,
    router_args: Sequence[str] = (),
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    prefill_env: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Start one prefill, one decode and a router. ``args`` go to both instances.

    ``prefill_env``: additions to the prefill's environment.
    """
    bootstrap = free_ports(1)[0]
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = []
        for i, mode in enumerate(("prefill", "decode")):
            own = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", backend]
            own += ["--disaggregation-bootstrap-port", str(bootstrap)]
            more = prefill_args if mode == "prefill" else decode_args
            if "--tp-size" not in more:
                own += [*ONE_THREAD, "--cpus", str(cores[i % len(cores)])]
            own += more
            env = {**os.environ, **prefill_env} if prefill_env and mode == "prefill" else None
            servers.append(stack.enter_context(launched(tmp, mode, "server", *own, *args, env=env)))
        prefill, decode = servers
        route = ["--prefill", prefill.url, str(bootstrap), "--decode", decode.url, *router_args]
        router = stack.enter_context(launched(tmp, "router", "router", *route))
        for server in (prefill, decode, router):
            server.wait_healthy()
        yield Pair(prefill, decode, router)


def ignored_signals(pid: int) -> set[int]:
    """Return the signals that a process ignores."""
    reported = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    bits = int(re.findall(r"SigIgn:\s*(\w+)", reported)[0], 16)
    return {number for number in signal.valid_signals() if bits >> (number - 1) & 1}
