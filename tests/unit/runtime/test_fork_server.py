"""Fork servers: what the processes that they make inherit, and what they do not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.import_path import with_inherited
from support.machine import limit

from pdserve.runtime.fork_server import ForkOrder, ForkServer, ForkServerFailed
from pdserve.server.child_process import AdoptedProcess

SHOWN = """
import ctypes, json, os, signal, sys, time
from pdserve.runtime.fork_server import ForkOrder, ForkServer

imported_by = os.getpid()
kept_open = os.open(os.devnull, os.O_RDONLY)


def main():
    if sys.argv[1:] == ["again"]:
        fork_server = ForkServer.fork()
        fork_server.send(ForkOrder(5, "shown", ("inner",)), 0, 1)
        [(number, pid)] = fork_server.started(1, time.monotonic() + 60)
        fork_server.close()
        os.waitpid(pid, 0)
        return
    descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    files = {n: os.readlink(f"/proc/self/fd/{n}") for n in descriptors if os.path.lexists(f"/proc/self/fd/{n}")}
    ignored = [number for number in (1, 2, 15) if signal.getsignal(number) is signal.SIG_IGN]
    print(json.dumps({
        "arguments": sys.argv[1:], "read": sys.stdin.read(), "variable": os.environ.get("A_VARIABLE"),
        "files": files, "ignored": ignored, "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(),
        "imported_here": imported_by == os.getpid(), "importer": imported_by,
        "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    }))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "shown.py").write_text(SHOWN)
    (tmp_path / "broken.py").write_text("raise ImportError('no such thing')")
    return {**os.environ, "PYTHONPATH": with_inherited(tmp_path)}


def held() -> tuple[int, set[int]]:
    """Return how many descriptors this process has, and the pids of its children, ended ones included."""
    process = psutil.Process()
    return process.num_fds(), {child.pid for child in process.children()}


@pytest.fixture
def fork_server(environment: dict[str, str], tmp_path: Path) -> Iterator[ForkServer]:
    before = held()
    with open(tmp_path / "own", "wb") as output:
        fork_server = ForkServer.spawn(("shown",), environment, output.fileno())
    with closing(fork_server):
        yield fork_server
    assert held() == before


def result(
    fork_server: ForkServer, order: ForkOrder, folder: Path, text: str = "", descriptors: Sequence[int] = ()
) -> dict[str, Any]:
    """Have the process started, and return what it has printed."""
    (folder / "in").write_text(text)
    with open(folder / "in", "rb") as stdin, open(folder / "out", "wb") as output:
        fork_server.send(order, stdin.fileno(), output.fileno(), descriptors)
    [(number, pid)] = fork_server.started(1, time.monotonic() + limit(60))
    assert number == order.number
    assert AdoptedProcess(pid).wait(limit(60)) == 0
    return json.loads((folder / "out").read_text())


def test_a_process_has_what_its_order_says_and_nothing_else(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    order = ForkOrder(3, "shown", ("one", "two"), {"A_VARIABLE": "set"}, descriptors=(17, 19), leads_group=True)
    with open(tmp_path / "a-file", "rb") as file:
        shown = result(fork_server, order, tmp_path, "some text", (file.fileno(), file.fileno()))
    files = {int(number): name for number, name in shown["files"].items()}
    out, named = str(tmp_path / "out"), str(tmp_path / "a-file")
    assert files == {0: str(tmp_path / "in"), 1: out, 2: out, 17: named, 19: named}
    assert (shown["arguments"], shown["read"], shown["variable"]) == (["one", "two"], "some text", "set")
    assert shown["ignored"] == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
    assert shown["group"]
    assert shown["parent"] == os.getpid()
    assert not shown["imported_here"]
    assert not shown["dumpable"], "other processes of this user could take the descriptors"


def test_processes_share_one_import_and_no_group_or_variable(fork_server: ForkServer, tmp_path: Path) -> None:
    first = result(fork_server, ForkOrder(1, "shown", (), {"A_VARIABLE": "set"}), tmp_path)
    second = result(fork_server, ForkOrder(2, "shown", ()), tmp_path)
    assert first["importer"] == second["importer"]
    assert second["variable"] is None
    assert not second["group"]


def test_a_process_that_takes_signals_has_those_of_the_start(fork_server: ForkServer, tmp_path: Path) -> None:
    ignored = [number for number in (1, 2, 15) if signal.getsignal(number) is signal.SIG_IGN]  # as by nohup
    assert result(fork_server, ForkOrder(1, "shown", (), takes_signals=True), tmp_path)["ignored"] == ignored


def test_a_forked_process_can_fork_others_itself(fork_server: ForkServer, tmp_path: Path) -> None:
    shown = result(fork_server, ForkOrder(1, "shown", ("again",)), tmp_path)
    assert shown["arguments"] == ["inner"]
    assert set(shown["files"]) <= {"0", "1", "2"}
    assert shown["parent"] != os.getpid()


def test_a_fork_server_that_ended_is_no_silence(environment: dict[str, str], tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as output:
        fork_server = ForkServer.spawn(("broken",), environment, output.fileno())
        with closing(fork_server):
            fork_server.send(ForkOrder(1, "shown", ()), output.fileno(), output.fileno())
            with pytest.raises(ForkServerFailed, match="the lines above say why"):
                list(fork_server.started(1, time.monotonic() + limit(60)))
    assert "no such thing" in (tmp_path / "out").read_text()


def test_waiting_for_a_process_has_a_limit(fork_server: ForkServer) -> None:
    with pytest.raises(TimeoutError, match="in time"):
        next(fork_server.started(1, time.monotonic()))
