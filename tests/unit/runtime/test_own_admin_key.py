"""A server that drew its own admin key says where it is when it is ready. The server here does nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import limit

PROCESS = """
import signal
import sys
from pdserve.runtime.child import start_child
from pdserve.runtime.process_options import ChildOptions
from pdserve.runtime.signals import STOP
def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, [STOP])
    start_child(sys.argv, ChildOptions).report_ready()
    signal.sigwait([STOP])
"""
SERVER = """
import sys
from pdserve.runtime.logs import configure_logging
from pdserve.server.options import ServerOptions
from pdserve.server.supervisor import Supervisor, take_free_ports
options, held = take_free_ports(ServerOptions(port=0, admin_key_file=sys.argv[1] or None))
configure_logging("supervisor", "info")
sys.exit(Supervisor(options, {"http": "a_process"}).run())
"""


@pytest.mark.parametrize("has_admin", [True, False])
def test_a_server_says_where_its_admins_key_is_when_it_is_ready(tmp_path: Path, has_admin: bool) -> None:
    (tmp_path / "a_process.py").write_text(PROCESS)
    (tmp_path / "admin").write_text("the-admin")
    argv = [sys.executable, "-c", SERVER, str(tmp_path / "admin") if has_admin else ""]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if "ready after" in line and "serves" in line)
            found = re.findall(r"; the admin's key is in (/\S+/admin-key)$", ready)
            assert len(found) == (0 if has_admin else 1)
            for file in found:
                assert Path(file).stat().st_mode & 0o777 == 0o600
                assert Path(file).read_text().strip() not in ready
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=limit(30))
        finally:
            process.kill()
    assert process.returncode == 0, rest
