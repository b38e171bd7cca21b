"""``python -P -m tools.secret_cost``: CPU time that ``--cluster-secret-file`` adds to a request and to a token.

Each round starts three pairs (``pdserve up``), one of them with a secret, and sends them blocks of requests by turns.
The second pair without a secret is the control: what it differs from the first is chance. The machine should be idle.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import psutil
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdserve.runtime.python import python_command
from pdserve.runtime.web.ports import free_ports

from .servers.child_processes import says_ok, stop
from .servers.process_cpu import cpu_seconds_now

POLL_SECONDS = 0.05
READY_SECONDS = 300.0
CLIENTS = 12
PROMPT_TOKENS = 32
FEW, MANY = 2, 66
"""Tokens of an answer: the difference of two requests is what ``MANY - FEW`` events cost."""
US = 1e6
BOOTSTRAPS = 10_000

Round = dict[str, dict[str, float]]
"""CPU µs by quantity (``"router, request"``), for each pair."""

app = App(help=__doc__)


class Pair:
    """A running pair. ``processes``: pids of its router and HTTP processes, by name."""

    def __init__(self, port: int, top: psutil.Process) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.processes: dict[str, int] = {}
        for child in top.children(recursive=True):
            title = " ".join(child.cmdline())
            for name in ("router", "prefill", "decode"):
                if title.startswith(f"pdserve {name}") and (name == "router" or title.rstrip().endswith(" http")):
                    self.processes[name] = child.pid

    def send(self, requests: int, tokens: int) -> dict[str, float]:
        """Stream ``requests`` answers of ``tokens`` tokens to 12 clients. Return CPU µs per request by process."""
        before = {name: cpu_seconds_now(pid) for name, pid in self.processes.items()}
        asyncio.run(self._send(requests, tokens))
        return {name: (cpu_seconds_now(pid) - before[name]) / requests * US for name, pid in self.processes.items()}

    async def _send(self, requests: int, tokens: int) -> None:
        left = iter(range(requests))
        limits = httpx.Limits(max_connections=CLIENTS)

        async def client_loop(client: httpx.AsyncClient) -> None:
            for _ in left:
                prompt = [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
                sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
                response = await client.post(f"{self.url}/generate", json=body)
                response.raise_for_status()

        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(client_loop(client) for _ in range(CLIENTS)))


@contextmanager
def running_pair(options: tuple[str, ...]) -> Iterator[Pair]:
    """Run ``pdserve up`` for the duration of the block. Raises ``RuntimeError`` if it does not become ready."""
    [port] = free_ports(1)
    argv = python_command("-m", "pdserve.server.cli", "up", "--port", str(port), *options)
    with tempfile.TemporaryFile() as log, httpx.Client(timeout=5.0, trust_env=False) as client:
        limit = time.monotonic() + READY_SECONDS
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not says_ok(client, f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > limit:
                    log.seek(0)
                    raise RuntimeError(f"pdserve up did not become ready:\n{log.read()[-2000:].decode()}")
                time.sleep(POLL_SECONDS)
            yield Pair(port, psutil.Process(process.pid))
        finally:
            stop(process, 30.0)


def measure(
    options: tuple[str, ...], secret: tuple[str, ...], blocks: int, requests: int
) -> dict[str, dict[str, float]]:
    """Start three pairs and measure them."""
    kinds = {"plain": options, "control": options, "secret": (*options, *secret)}
    with ExitStack() as stack:
        order = random.sample(list(kinds), len(kinds))
        pairs = {name: stack.enter_context(running_pair(kinds[name])) for name in order}
        for pair in pairs.values():
            pair.send(requests // 4, FEW)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
        for _ in range(blocks):
            for name in random.sample(order, len(order)):
                few, many = pairs[name].send(requests, FEW), pairs[name].send(requests // 4, MANY)
                for process, spent in few.items():
                    event = (many[process] - spent) / (MANY - FEW)
                    found[name].setdefault(f"{process}, request", []).append(spent)
                    found[name].setdefault(f"{process}, event", []).append(event)
        return {name: {what: statistics.mean(values) for what, values in own.items()} for name, own in found.items()}


def _difference(rounds: list[Round], one: str, other: str, what: str) -> str:
    """Return the mean of the rounds' differences and its 95 % interval, by bootstrap."""
    values = np.array([found[one][what] - found[other][what] for found in rounds])
    means = np.random.default_rng(0).choice(values, (BOOTSTRAPS, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{values.mean():+.1f} [{low:.1f}, {high:.1f}]"


@app.default
def main(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    rounds: int = 6,
    blocks: int = 4,
    requests: int = 600,
) -> None:
    """Measure and print mean differences with 95 % intervals over the rounds.

    Parameters
    ----------
    options
        Options of the pairs, after ``--``.
    rounds
        Starts of each pair; at least two.
    blocks
        Blocks of requests that each start is sent.
    requests
        Requests of a block.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "secret")
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(32) + "\n")
        secret = ("--cluster-secret-file", os.fspath(file))
        found = [measure(options, secret, blocks, requests) for _ in range(rounds)]
    table = Table("CPU time, µs", "without a secret", "with one", "control")
    for what in found[0]["plain"]:
        plain = statistics.mean(one["plain"][what] for one in found)
        secret_cost = _difference(found, "secret", "plain", what)
        table.add_row(what, f"{plain:.1f}", secret_cost, _difference(found, "control", "plain", what))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(app())
