"""``python -P -m tools.starts``: how long a server or a pair takes to start, and what memory it has then.

Each round starts ``pdserve server`` and ``pdserve up``, by turns, asks ``/health`` until it answers 200, waits a second
and reads the memory of all processes. PSS counts a page that several processes share in parts. The machine should be
idle.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.runtime.python import python_command
from pdserve.runtime.web.ports import free_ports

from .servers.child_processes import says_ok, stop
from .servers.process_cpu import cpu_seconds_now

POLL_SECONDS = 0.005
READY_SECONDS = 300.0
SETTLE_SECONDS = 1.0
MB = 1e6
COMMANDS = ("server", "up")

app = App(help=__doc__)


@dataclass
class Start:
    """One start. ``ready``: seconds until ``/health`` was 200; ``cpu``: CPU seconds until a second later.

    ``pss`` in bytes; ``torch``: processes that have mapped libtorch.
    """

    ready: float
    cpu: float
    pss: dict[str, int]
    torch: list[str]


def start(command: str, options: tuple[str, ...]) -> Start:
    """Start ``pdserve command``, measure it and end it. Raises ``RuntimeError`` if it does not become ready."""
    [port] = free_ports(1)
    argv = python_command("-m", "pdserve.server.cli", command, "--port", str(port), *options)
    with tempfile.TemporaryFile() as log, httpx.Client(timeout=5.0, trust_env=False) as client:
        begin = time.monotonic()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not says_ok(client, f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > begin + READY_SECONDS:
                    log.seek(0)
                    raise RuntimeError(f"pdserve {command} did not become ready:\n{log.read()[-2000:].decode()}")
                time.sleep(POLL_SECONDS)
            ready = time.monotonic() - begin
            time.sleep(SETTLE_SECONDS)
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            pss = {f"{one.pid} {' '.join(one.cmdline())}": one.memory_full_info().pss for one in family}
            torch = [name for name in pss if "libtorch" in Path("/proc", name.split()[0], "maps").read_text()]
            return Start(ready, cpu_seconds_now(process.pid), pss, torch)
        finally:
            stop(process, 30.0)


@app.default
def main(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    rounds: int = 10,
    command: tuple[str, ...] = COMMANDS,
    processes: bool = False,
) -> None:
    """Measure starts and print medians with their range.

    Parameters
    ----------
    options
        Options of the servers, after ``--``.
    rounds
        Starts of each command.
    command
        What to start.
    processes
        Also print the PSS of each process of the last start.
    """
    starts: dict[str, list[Start]] = {name: [] for name in command}
    for _ in range(rounds):
        for name in command:
            starts[name].append(start(name, options))
    table = Table("pdserve", "ready, s", "processor time, s", "PSS, MB", "with libtorch")
    for name, own in starts.items():
        figures = (
            [one.ready for one in own],
            [one.cpu for one in own],
            [sum(one.pss.values()) / MB for one in own],
        )
        table.add_row(name, *(_text(values) for values in figures), str(max(len(one.torch) for one in own)))
    Console().print(table)
    if processes:
        for name, own in starts.items():
            for title, pss in own[-1].pss.items():
                print(f"{name:8}{pss / MB:8.1f} MB  {title.partition(' ')[2][:60]}")


def _text(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(app())
