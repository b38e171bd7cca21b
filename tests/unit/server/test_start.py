"""How a child process starts: its module is imported without the collector, and runs with it."""

from __future__ import annotations

import os
import subprocess
import sys

import zmq
from support.machine import limit

from pdserve.messages import channel
from pdserve.messages.channel import Receiver
from pdserve.messages.control import Ready
from pdserve.messages.routes import ToSupervisor
from pdserve.runtime.child import ChildContext
from pdserve.server.options import ServerOptions

MODULE = """
import gc
import sys

while_imported = gc.isenabled()


def main():
    print(while_imported, gc.isenabled(), gc.get_freeze_count() > 0, sys.argv[1:])
"""


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
