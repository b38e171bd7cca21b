"""A real instance around a fake model worker, and a handle to measure it.

``python -P -m tools.step_overhead.fake_instance PARENT_PID`` is the instance's supervisor. It reads its
``ServerOptions`` from standard input, prints its run directory, and dies with its parent.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq

from pdserve.benchmark.errors import ServerError
from pdserve.messages.channel import ipc_address
from pdserve.runtime.child import die_with_parent
from pdserve.runtime.logs import configure_logging
from pdserve.runtime.python import python_command
from pdserve.runtime.web import own_admin_key
from pdserve.server.options import ServerOptions
from pdserve.server.process_table import process_modules
from pdserve.server.supervisor import Supervisor

from ..environment import environment
from ..servers.child_processes import stop
from ..servers.process_cpu import find_children
from .fake_worker import QUESTIONS, Occupy, Report, StepRecord

READY_SECONDS = 60.0
STOP_SECONDS = 10.0
ANSWER_MS = 10_000


class FakeInstance:
    """A running instance. ``pids``: its processes by their short names."""

    def __init__(self, port: int, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process
        self._wait_healthy()
        self.pids = {"supervisor": process.pid}
        # A process's title ends in its name, see start_child.
        self.pids |= {title.split()[-1]: pid for title, pid in find_children(process.pid).items()}
        self._ctx: zmq.Context[Any] = zmq.Context()
        self._questions: zmq.Socket[Any] = self._ctx.socket(zmq.REQ)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self._questions.connect(ipc_address(run_dir, QUESTIONS))

    def occupy(self, batch: int, step_seconds: float) -> None:
        """Have each step that decodes ``batch`` requests take ``step_seconds`` of CPU time.

        Start a new record of steps.
        """
        self._ask(Occupy(batch, step_seconds))

    def record(self) -> StepRecord:
        """Return the record of all steps since ``occupy``. Call it when no request is running."""
        return msgspec.msgpack.decode(self._ask(Report()), type=StepRecord)

    def _ask(self, question: Occupy | Report) -> bytes:
        self._questions.send(msgspec.msgpack.encode(question))
        return bytes(self._questions.recv())

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError("the instance died while starting; its log says why")
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            time.sleep(0.05)
        raise ServerError(f"the instance was not ready within {READY_SECONDS:.0f} s")

    def close(self) -> None:
        """Close the sockets to the instance. ``fake_instance`` stops its processes."""
        self._ctx.destroy(linger=0)


@contextlib.contextmanager
def fake_instance(options: ServerOptions) -> Iterator[FakeInstance]:
    """Run an instance with a fake model worker within the ``with`` block. Yield a handle once it is ready.

    Raises ``ServerError`` if it does not start.
    """
    argv = python_command("-m", "tools.step_overhead.fake_instance", str(os.getpid()))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(options))
        process.stdin.close()
        try:
            run_dir = Path(process.stdout.readline().decode().strip())
            instance = FakeInstance(options.port, run_dir, process)
            try:
                yield instance
            finally:
                instance.close()
        finally:
            stop(process, STOP_SECONDS)


def main() -> None:
    """Run the supervisor of an instance with a fake model worker, with the options from standard input."""
    die_with_parent(int(sys.argv[1]))
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerOptions)
    setproctitle.setproctitle(f"pdserve unified:{options.port} supervisor")
    configure_logging("fake instance", options.log_level, options.log_format)
    # The instance lives for one measurement, so the file of its admin key is of no use.
    logging.getLogger(own_admin_key.__name__).setLevel(logging.ERROR)
    supervisor = Supervisor(options, modules={**process_modules(options), "worker": "tools.step_overhead.fake_worker"})
    print(supervisor.run_dir, flush=True)
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
