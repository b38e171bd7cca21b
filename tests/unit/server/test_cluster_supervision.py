"""How a cluster starts, restarts and ends its processes: real processes, with a small HTTP server for each instance."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support.machine import limit
from support.processes import ignored_signals

INSTANCE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGRTMIN, signal.SIG_IGN)" + INSTANCE
HASTY = (
    """
import signal, sys
def leave(number, frame):
    print("left at once", flush=True)
    sys.exit(0)
signal.signal(signal.SIGRTMIN, signal.SIG_IGN)
signal.signal(signal.SIGINT, leave)
"""
    + INSTANCE
)
BROKEN = "print('no model'); raise SystemExit(3)"
KEYED = """
import os, sys
from pdserve.runtime.run_dir import RunDir
from pdserve.runtime.web.own_admin_key import draw_own_admin_key
from pdserve.server.options import ServerOptions
run_dir = RunDir()
draw_own_admin_key(ServerOptions(), run_dir.path)
""" + INSTANCE.replace("serving", "drawn in {run_dir.path}").replace('print("', 'print(f"')

MORTAL = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        if b"poison" in self.rfile.read(int(self.headers["content-length"])):
            os._exit(1)
        self.answer(b'{"text": "good"}')
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""
ROUTER = """
import sys
from pdserve.router.options import RouterOptions
from pdserve.router.process import run_router
port, urls = int(sys.argv[1]), sys.argv[2].split(",")
sys.exit(run_router(RouterOptions(worker=urls, port=port, health_check_interval=0.1, drain_timeout=0)))
"""

DRIVER = """
import sys
from pdserve.runtime.logs import configure_logging
from pdserve.server.cluster import Cluster
from pdserve.server import cluster
from pdserve.server.cluster_options import ClusterOptions
from pdserve.runtime.web.ports import free_ports
from pdserve.server.cluster_plan import ClusterPlan, ProcessPlan
configure_logging("up", "info")
cluster.KILL_GRACE = 0.5
def plan(name, code, port, *more):
    return ProcessPlan(name, ("-c", code, *map(str, (port, *more))), f"http://127.0.0.1:{port}")
count = int(sys.argv[4])
ports = free_ports(count + 1)
instances = tuple(plan(f"unified-{i}", sys.argv[1], ports[i]) for i in range(count))
router = plan("router", sys.argv[2], ports[-1], ",".join(instance.url for instance in instances))
options = ClusterOptions(prefill=0, decode=0, unified=count, drain_timeout=0.0, max_restarts=int(sys.argv[3]))
sys.exit(Cluster(options, ClusterPlan(instances, router)).run())
"""


class Up:
    """A running cluster with output that is read line by line."""

    def __init__(self, instance=INSTANCE, max_restarts=5, router=INSTANCE, instances=1):
        driver = [sys.executable, "-u", "-c", DRIVER, instance, router, str(max_restarts), str(instances)]
        argv = ["sh", "-c", """trap '' HUP; exec "$0" "$@" """, *driver]  # as nohup does
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(argv, **pipes)
        self.lines = []

    def until(self, pattern):
        """Read until a line matches."""
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matches {pattern!r} in:\n{''.join(self.lines)}")

    def child(self, port_word):
        (found,) = [c for c in psutil.Process(self.process.pid).children() if port_word in c.cmdline()]
        return found

    def ports(self):
        return re.findall(r"http://127\.0\.0\.1:(\d+) +ready", "".join(self.lines))


@pytest.fixture
def up():
    started = []

    def start(*args, **kwargs):
        started.append(Up(*args, **kwargs))
        return started[-1]

    yield start
    for cluster in started:
        children = psutil.Process(cluster.process.pid).children() if cluster.process.poll() is None else []
        for process in (cluster.process, *children):
            process.kill()
        cluster.process.communicate(timeout=limit(10))


def test_a_dead_process_is_started_again_on_its_port_and_one_signal_ends_all(up):
    cluster = up()
    cluster.until("Ctrl-C stops everything")
    assert signal.SIGHUP in ignored_signals(cluster.process.pid)
    port = cluster.ports()[0]
    victim = cluster.child(port)
    victim.kill()
    cluster.until("unified-0 was killed by SIGKILL: it is started again")
    cluster.until(r"unified-0 +\| serving")
    assert cluster.child(port).pid != victim.pid
    children = psutil.Process(cluster.process.pid).children()
    cluster.process.send_signal(signal.SIGTERM)
    cluster.until(r"\[up\] stopped")
    assert cluster.process.wait(limit(10)) == 0
    assert not any(child.is_running() for child in children)


def test_the_summary_names_the_files_of_admin_keys_and_no_key(up):
    cluster = up(instance=KEYED)
    cluster.until("Ctrl-C stops everything")
    text = "".join(cluster.lines)
    [folder] = re.findall(r"unified-0 +\| drawn in (/\S+)", text)
    summary = text[text.index("is served on") :]
    assert re.findall(r"^  (\S+) +(/\S+)$", summary, re.MULTILINE) == [("unified-0", f"{folder}/admin-key")]
    assert Path(folder, "admin-key").read_text().strip() not in text
    cluster.process.send_signal(signal.SIGTERM)
    cluster.until(r"\[up\] stopped")
    shutil.rmtree(folder)


def test_where_no_key_was_drawn_the_summary_speaks_of_none(up):
    cluster = up()
    cluster.until("Ctrl-C stops everything")
    assert "admin" not in "".join(cluster.lines)


def test_a_death_during_start_up_ends_the_cluster(up):
    cluster = up(instance=BROKEN)
    cluster.until(r"unified-0 ended with exit code 3 while the cluster was starting")
    assert cluster.process.wait(limit(10)) == 1
    assert any(re.search(r"unified-0 +\| no model", line) for line in cluster.lines)


def test_a_process_that_keeps_dying_ends_the_cluster(up):
    cluster = up(max_restarts=1)
    cluster.until("Ctrl-C stops everything")
    port = cluster.ports()[1]
    cluster.child(port).kill()
    cluster.until(r"router +\| serving")
    cluster.child(port).kill()
    cluster.until("router was killed by SIGKILL, for the 2nd time in a minute")
    assert cluster.process.wait(limit(10)) == 1


def test_a_process_that_does_not_stop_is_killed(up):
    cluster = up(instance=STUBBORN)
    cluster.until("Ctrl-C stops everything")
    stubborn = cluster.child(cluster.ports()[0])
    os.kill(cluster.process.pid, signal.SIGINT)
    cluster.until("unified-0 did not end in time: killed")
    assert cluster.process.wait(limit(10)) == 0
    assert not stubborn.is_running()


def test_a_second_signal_lets_processes_end_by_themselves(up):
    """A plain kill left run directories with their admin keys."""
    cluster = up(instance=HASTY)
    cluster.until("Ctrl-C stops everything")
    os.kill(cluster.process.pid, signal.SIGTERM)
    cluster.until("stopping")
    os.kill(cluster.process.pid, signal.SIGINT)
    cluster.until(r"unified-0 +\| left at once")
    assert cluster.process.wait(limit(10)) == 0
    assert not any("killed" in line for line in cluster.lines)


def test_a_request_that_kills_instances_does_not_end_the_cluster(up):
    """No instance dies twice: after two deaths the router refuses the request for a minute."""
    cluster = up(MORTAL, max_restarts=1, router=ROUTER, instances=2)
    cluster.until("Ctrl-C stops everything")
    with httpx.Client(base_url=f"http://127.0.0.1:{cluster.ports()[-1]}", timeout=limit(20)) as client:
        for _ in range(12):
            answer = client.post("/generate", json={"text": "poison"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "request_crashes_instances")
        deadline = time.monotonic() + limit(20)
        while (answer := client.post("/generate", json={"text": "a good one"})).status_code == 503:
            assert time.monotonic() < deadline
        assert answer.json() == {"text": "good"}
    cluster.process.send_signal(signal.SIGTERM)
    cluster.until(r"\[up\] stopped")
    assert cluster.process.wait(limit(10)) == 0
    assert sum("it is started again" in line for line in cluster.lines) == 2


@pytest.mark.parametrize("files", [8, 12, 16])
def test_too_few_open_files_are_said_in_words(files):
    """The limit is reached before the fork server starts, at its start, and at the second process."""
    command = [sys.executable, "-P", "-m", "pdserve.server.cli", "up", "--port", "0", "--load-format", "dummy"]
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 1
    assert "raise ulimit -n to 1024 or more" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
