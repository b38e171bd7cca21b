"""How child processes start: modules are imported without the collector, and run with it; most are forked together."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys

import pytest
import zmq
from support.import_path import with_inherited
from support.machine import limit

from pdserve.messages import channel
from pdserve.messages.channel import Receiver
from pdserve.messages.control import Ready
from pdserve.messages.routes import ToSupervisor
from pdserve.runtime.child import ChildContext
from pdserve.server.child_process import Start, StartFailed, start_processes
from pdserve.server.options import ServerOptions

MODULE = """
import gc
import sys

while_imported = gc.isenabled()


def main():
    print(while_imported, gc.isenabled(), gc.get_freeze_count() > 0, sys.argv[1:])
"""

FORKED = """
import gc
import os
import sys
import threading

imported_by = os.getpid()


def main():
    seen = {"argv": sys.argv[1:], "own": os.getpid() == imported_by, "collects": gc.isenabled()}
    seen |= {"frozen": gc.get_freeze_count() > 0, "threads": threading.active_count(), "parent": os.getppid()}
    seen |= {"key": "PDSERVE_API_KEY" in os.environ, "importer": imported_by}
    os.write(1, f"{seen}\\n".encode())  # one write, as another process writes to the same file
    sys.exit(7)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", with_inherited(tmp_path))
    monkeypatch.setenv("PDSERVE_API_KEY", "a-key")
    (tmp_path / "a_process.py").write_text(FORKED)
    (tmp_path / "broken.py").write_text("raise ImportError('no such thing')")
    return [Start("http", "a_process", tmp_path / "1.json"), Start("scheduler", "a_process", tmp_path / "2.json")]


def test_processes_beside_the_workers_are_forked_children_that_imported_together(tmp_path, modules):
    with open(tmp_path / "out", "wb") as out:
        children = list(start_processes(modules, out, (), limit(60)))
    assert {child.name for child in children} == {"http", "scheduler"}
    assert [child.process.wait(limit(60)) for child in children] == [7, 7]
    seen = [ast.literal_eval(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(each.pop("argv") for each in seen) == [[str(start.spec)] for start in modules]
    assert len({each.pop("importer") for each in seen}) == 1
    expected = {"own": False, "collects": True, "frozen": True, "threads": 1, "parent": os.getpid(), "key": False}
    assert seen == [expected] * 2


def test_a_module_that_can_t_be_imported_fails_the_start_and_leaves_the_started_ones_to_the_caller(tmp_path, modules):
    modules[1] = modules[1]._replace(module="broken")
    with open(tmp_path / "out", "wb") as out:
        starting = start_processes(modules, out, (), limit(60))
        child = next(starting)
        with pytest.raises(StartFailed, match="the lines above say why"):
            next(starting)
    assert child.process.wait(limit(60)) == 7
    assert "no such thing" in (tmp_path / "out").read_text()


def test_processes_that_are_not_started_in_time_are_named(tmp_path, modules):
    with open(tmp_path / "out", "wb") as out, pytest.raises(StartFailed, match="http, scheduler"):
        list(start_processes(modules, out, (), 0.0))


def test_an_adopted_process_is_signalled_and_waited_for(tmp_path, modules):
    (tmp_path / "a_process.py").write_text("import signal, time\ndef main():\n    signal.pause()\n")
    with open(tmp_path / "out", "wb") as out:
        [child] = start_processes(modules[:1], out, (), limit(60))
    assert child.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.0)
    child.process.kill()
    assert child.process.wait(limit(60)) == -signal.SIGKILL
    child.process.kill()
    assert child.process.poll() == -signal.SIGKILL


def test_what_is_imported_is_never_looked_at_and_the_rest_is(tmp_path):
    (tmp_path / "a_process.py").write_text(MODULE)
    argv = [sys.executable, "-m", "pdserve.runtime.start", "a_process", "spec.json"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "False True True ['spec.json']\n", done.stderr


def test_an_import_that_fails_is_no_silence(tmp_path):
    argv = [sys.executable, "-m", "pdserve.runtime.start", "no_such_process", "spec.json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 1
    assert "No module named 'no_such_process'" in done.stderr


def test_a_supervisor_that_listens_late_hears_that_a_process_is_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "LINGER_MS", 0)
    ctx = zmq.Context()
    child = ChildContext("detokenizer", tmp_path, "epoch", ServerOptions(), "secret", ctx)
    child.report_ready({"seconds": 1.0})
    inbox: Receiver = Receiver(ctx, child.address("supervisor"), ToSupervisor)
    try:
        assert inbox.recv(int(1000 * limit(10))) == [Ready("detokenizer", {"seconds": 1.0})]
    finally:
        inbox.close()
        ctx.destroy(linger=0)
