"""Runs an engine's processes for the time of a block: started in order, awaited, always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from pdserve.runtime.web.ports import free_ports

from ..servers.child_processes import says_ok, stop
from .engines import HOST, Engine, Launch
from .errors import PeerDied
from .layout import PeerSetup

READY_SECONDS = 600.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.25


@contextmanager
def running(engine: Engine, setup: PeerSetup, logs: Path) -> Iterator[str]:
    """Run an engine's processes within the ``with`` block, each started when the one before is ready.

    Yield the base URL. ``logs``: folder for their logs. Raises ``PeerDied`` if one does not become ready.
    """
    ports = free_ports(engine.num_ports)
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for launch in engine.launches(setup, ports):
            stack.enter_context(_process(launch, logs / f"{launch.name}.log"))
        yield f"http://{HOST}:{ports[0]}"


@contextmanager
def _process(launch: Launch, log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        # A session of its own: what it starts in turn can be ended with it.
        process = subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **launch.env},
            start_new_session=True,
        )
    try:
        _wait_ready(launch, process, log)
        yield
    finally:
        _stop(process)


def _wait_ready(launch: Launch, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while not says_ok(client, launch.health):
            if process.poll() is not None:
                raise PeerDied(f"{launch.name} ended with {process.returncode}:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise PeerDied(f"{launch.name} was not ready within {READY_SECONDS:g} s:\n{_tail(log)}")
            time.sleep(POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    stop(process, STOP_SECONDS)
    # Its children, where it left some: the group outlives its leader.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
