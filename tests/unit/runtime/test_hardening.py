"""The first actions of a server's processes: private files, no core dumps, no debugger may attach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.machine import limit

from pdserve.runtime.child import ChildSpec
from pdserve.server.child_process import child_environment
from pdserve.server.options import ServerOptions

SEEN = """
import ctypes, json, os, resource, sys
from pathlib import Path
print(json.dumps([
    ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),  # PR_GET_DUMPABLE
    os.umask(0),
    list(resource.getrlimit(resource.RLIMIT_CORE)),
    os.path.exists("/proc/self/fd/0") and len(os.listdir("/proc/self/fd")) > 2,
]))
"""
STARTS = {
    "server": """
import socket
from pdserve.server.options import ServerOptions
from pdserve.server.supervisor import run_server
with socket.create_server(("127.0.0.1", 0)) as taken:
    assert run_server(ServerOptions(port=taken.getsockname()[1], allow_core_dumps={allow})) == 1
""",
    "router": """
from pdserve.router.options import RouterOptions
from pdserve.router.process import run_router
assert run_router(RouterOptions(allow_core_dumps={allow})) == 2
""",
    "up": """
from pdserve.server.cluster import run_cluster
from pdserve.server.cluster_options import ClusterOptions
assert run_cluster(ClusterOptions(cpus="99999", allow_core_dumps={allow})) == 2
""",
}
CHILD = """
import sys
from pdserve.runtime.child import start_child
from pdserve.runtime.process_options import ChildOptions
start_child(sys.argv, ChildOptions)
"""
CLOSED = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE, as a fork server has it"
PRIVATE = 0o077
NO_CORE = [1, 1]
"""Less than a page, which is the least that the kernel writes; and it starts no program of ``core_pattern`` then."""


def seen(code: str, *argv: str) -> tuple[int, int, list[int], bool]:
    """Return the state of a process that has run ``code``. It begins with the kernel's defaults.

    The state is whether it is dumpable, its umask, its limits on core dumps, and whether it sees its own descriptors.
    """
    command = ["sh", "-c", 'umask 022; ulimit -S -c "$(ulimit -H -c)"; exec "$0" "$@"', sys.executable, "-P", "-c"]
    done = subprocess.run([*command, code + SEEN, *argv], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    dumpable, umask, core, sees_itself = json.loads(done.stdout.splitlines()[-1])
    return dumpable, umask, core, sees_itself


@pytest.mark.parametrize("start", STARTS)
def test_a_servers_first_process_is_hardened_unless_told_otherwise(start: str) -> None:
    assert seen(STARTS[start].format(allow=False)) == (0, PRIVATE, NO_CORE, True)
    dumpable, umask, core, _ = seen(STARTS[start].format(allow=True))
    assert (dumpable, umask) == (1, PRIVATE)
    assert core[0] == core[1]


@pytest.mark.parametrize("inherited", ["", CLOSED], ids=["executed", "forked"])
@pytest.mark.parametrize(("name", "dumpable"), [("http", 0), ("scheduler", 0), ("worker", 1), ("worker-1", 1)])
def test_children_are_hardened_and_workers_stay_open_to_each_other(
    tmp_path: Path, name: str, dumpable: int, inherited: str
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_bytes(msgspec.json.encode(ChildSpec(name, str(tmp_path), "e", os.getpid(), ServerOptions(), "s")))
    assert seen(inherited + CHILD, str(spec)) == (dumpable, PRIVATE, NO_CORE, True)
    assert not spec.exists()  # it had the server's keys


@pytest.mark.parametrize("name", ["tokenizer", "worker", "worker-1"])
def test_no_child_has_the_api_key_in_its_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "a-key")
    assert "a-key" not in child_environment(name).values()


def test_the_process_that_renders_templates_is_hardened() -> None:
    code = "import os; from pdserve.model_files.text import template_process; os.close(0); template_process.main()"
    assert seen(code)[:3] == (0, PRIVATE, NO_CORE)


def test_a_limit_that_is_lower_already_stays(tmp_path: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))" + STARTS["router"].format(allow=False)
    assert seen(code) == (0, PRIVATE, [0, 0], True)


@pytest.mark.parametrize("name", ["http", "worker"])
def test_a_crash_leaves_no_core(tmp_path: Path, name: str) -> None:
    """Told by the status: whether a core was dumped is a bit of it."""
    spec = tmp_path / "spec.json"
    spec.write_bytes(msgspec.json.encode(ChildSpec(name, str(tmp_path), "e", os.getpid(), ServerOptions(), "s")))
    # A process that is not hardened would leave its core there.
    shell = 'cd "$1"; ulimit -c "$(ulimit -H -c)"; exec "$2" -P -c "$3" "$4"'
    argv = ["sh", "-c", shell, "sh", str(tmp_path), sys.executable, CHILD + "import os; os.kill(os.getpid(), 11)"]
    pid = os.posix_spawn("/bin/sh", [*argv, str(spec)], os.environ)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == 11
    assert not os.WCOREDUMP(status)
