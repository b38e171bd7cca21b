"""``python -m pdserve.runtime.fork_server FD MODULE …``: imports modules once, and forks processes that run them.

    caller ──ForkOrder, descriptors──▶ fork server ──forks twice──▶ new process ──its pid──▶ caller

So processes that need the same modules neither import them again nor have them in memory twice. A fork server has one
thread, as threads do not survive a fork, and holds no secrets. It ends when its caller closes the connection.

Each new process becomes a child of the caller, which is a subreaper for that time: the process in between ends at once.
A process that a fork server made can be a fork server itself (``ForkServer.fork``), with what is imported by then.
"""

from __future__ import annotations

from . import clean_start  # isort: skip  # noqa: F401

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec
import setproctitle

from .gc_control import uncollected
from .hardening import PR_SET_DUMPABLE, prctl
from .python import python_command
from .signals import PARENTS, leave_signals_to_parent

MODULE = "pdserve.runtime.fork_server"
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.0002
"""Time between two looks at whether the process in between has ended. It does nothing else."""
MAX_ORDER_BYTES = 1 << 16
MAX_DESCRIPTORS = 64

SignalHandlers = Mapping[signal.Signals, Any]
"""Python's handler of each signal, or ``SIG_IGN`` or ``SIG_DFL``."""


class ForkServerFailed(Exception):
    """A fork server has ended, and did not start all processes."""


class ForkOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a process to be forked, which runs ``main`` of ``module`` with ``arguments`` in ``sys.argv[1:]``."""

    number: int
    """Name of the order, which the answer repeats."""
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = {}
    """Variables that it has besides those of the fork server."""
    descriptors: tuple[int, ...] = ()
    """Numbers that it gives the descriptors which follow input and output; it has no others."""
    leads_group: bool = False
    """Whether it leads a process group of its own."""
    takes_signals: bool = False
    """Whether it treats signals as the fork server found them at its start. Otherwise it ignores ``PARENTS``."""


class ForkServer:
    """Connection to a fork server. The caller is a subreaper until ``close``."""

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        """Make a connection of a socket and ``end``, which kills the fork server and waits for its end."""
        self._connection = connection
        self._end = end
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def spawn(cls, modules: Sequence[str], environment: Mapping[str, str], output: int | None = None) -> ForkServer:
        """Start a fork server that imports ``modules`` before it reads its first order. Raises ``OSError``.

        ``output``: descriptor for its own messages; None: that of this process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                python_command("-m", MODULE, str(theirs.fileno()), *modules),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(theirs.fileno(),),
                process_group=0 if output is None else None,
            )

        def end() -> None:
            process.kill()
            process.wait()

        return cls(ours, end)

    @classmethod
    def fork(cls) -> ForkServer:
        """Make a copy of this process a fork server. It returns here only in this process. Raises ``OSError``.

        This process must have one thread. Call it before any secret is in memory.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():

            def end() -> None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

            theirs.close()
            return cls(ours, end)
        ours.close()
        serve(theirs, leave_signals())
        sys.exit()

    def send(self, order: ForkOrder, stdin: int, output: int, descriptors: Sequence[int] = ()) -> None:
        """Have a process started, with these descriptors of this process. ``started`` has its pid.

        ``output``: for standard output and error. Raises ``ForkServerFailed``.
        """
        try:
            socket.send_fds(self._connection, [msgspec.json.encode(order)], [stdin, output, *descriptors])
        except OSError as e:
            raise ForkServerFailed(f"the fork server has ended ({e.strerror}); the lines above say why") from e

    def started(self, count: int, deadline: float) -> Iterator[tuple[int, int]]:
        """Yield the number and the pid of the next ``count`` processes, as soon as each is started.

        Raises ``TimeoutError`` at ``deadline`` (``time.monotonic()``), and ``ForkServerFailed``.
        """
        for _ in range(count):
            if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the fork server did not start it in time")
            answer = b""
            with suppress(ConnectionResetError):  # it has ended with orders unread
                answer = self._connection.recv(64)
            if not answer:
                raise ForkServerFailed("the fork server has ended; the lines above say why")
            number, pid = map(int, answer.split())
            yield number, pid

    def close(self) -> None:
        """End the fork server, and be no subreaper any longer. Processes that it has started go on."""
        self._connection.close()
        self._end()
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def leave_signals() -> SignalHandlers:
    """Ignore the signals that the caller acts on, and return how they were treated before."""
    found = {number: signal.getsignal(number) for number in PARENTS}
    leave_signals_to_parent()
    return found


def serve(connection: socket.socket, found: SignalHandlers) -> None:
    """Fork a process for each order that comes. Return when the caller has closed ``connection``.

    Also returns in each new process, once its module's ``main`` has returned. ``found``: what ``leave_signals``
    returned.
    """
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
        if not text:
            return
        order = msgspec.json.decode(text, type=ForkOrder)
        module = prepare(order.module)
        pid = fork_orphan()
        if not pid:
            if order.takes_signals:
                for number, handler in found.items():
                    signal.signal(number, handler)
            connection.close()
            become(order, descriptors)
            module.main()
            return
        with suppress(OSError):  # the caller has ended, and so will this process
            connection.send(f"{order.number} {pid}".encode())
        for descriptor in descriptors:
            os.close(descriptor)


def prepare(name: str) -> ModuleType:
    """Import a module, and prepare for reading options of the type that its ``OPTIONS`` is, if it has that.

    The garbage collector does not run meanwhile, and ignores from then on what was made.
    """
    with uncollected():
        module = import_module(name)
        if options := getattr(module, "OPTIONS", None):
            msgspec.convert({}, options)  # what msgspec builds for a type takes 2 MB and 4 ms
    return module


def become(order: ForkOrder, descriptors: Sequence[int]) -> None:
    """Give this process what the order says: arguments, environment, group, and the received descriptors alone."""
    if order.leads_group:
        os.setpgid(0, 0)
    os.environ.update(order.environment)
    sys.argv[1:] = order.arguments
    free = max((2, *order.descriptors)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in descriptors]
    stdin, output, *others = moved
    numbers = {0: stdin, 1: output, 2: output, **dict(zip(order.descriptors, others, strict=True))}
    for number, source in numbers.items():
        os.dup2(source, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with suppress(OSError):  # the folder's own descriptor
                os.close(number)


def fork_orphan() -> int:
    """Fork twice, so that the new process becomes a child of the caller (the subreaper).

    Return the new process's pid, and 0 in that process. The process in between has ended by then, and was waited for.
    """
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        new = int(os.read(read, 32) or b"0")
        os.close(read)
        os.waitpid(between, 0)
        if not new:
            raise OSError("no process could be forked")
        return new
    between = os.getpid()
    if new := os.fork():
        os.write(write, str(new).encode())
        os._exit(0)
    os.close(read)
    os.close(write)
    while os.getppid() == between:
        time.sleep(POLL_SECONDS)
    return 0


def main() -> None:
    """Serve the connection that the first argument is the descriptor of. Import the modules that the others name."""
    # Descriptors of secrets pass through this process.
    prctl(PR_SET_DUMPABLE, 0)
    descriptor, *modules = sys.argv[1:]
    # The library finds the place of a title by the environment, so before that changes.
    setproctitle.setproctitle("pdserve fork server")
    found = leave_signals()
    connection = socket.socket(fileno=int(descriptor))
    for module in modules:
        prepare(module)
    serve(connection, found)


if __name__ == "__main__":
    main()
