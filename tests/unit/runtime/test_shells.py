"""Surroundings that shells and services give: ignored signals, closed streams, full pipes, locales, no folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.import_path import with_inherited
from support.machine import limit
from support.processes import ignored_signals, wait_until

from pdserve.runtime import signals
from pdserve.runtime.run_dir import run_dir_parent
from pdserve.runtime.web.ports import check_port_free, hold_free_port, listen
from pdserve.server import supervisor
from pdserve.server.cli import main
from pdserve.server.options import ServerOptions
from pdserve.server.supervisor import take_free_ports

PREPARED = "import sys; sys.argv[0] = 'pdserve'; from pdserve.runtime import clean_start; import json, os, socket; "
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
ROUTER = "-m pdserve.server.cli router --worker http://127.0.0.1:9 --port 0"
URL = re.compile(r"http://127\.0\.0\.1:([1-9]\d*): 0 prefill")
SUPERVISOR = """
import sys
from pdserve.runtime.logs import configure_logging
from pdserve.server.options import ServerOptions
from pdserve.server.supervisor import Supervisor
configure_logging("supervisor", "info", never_blocks=True)
options = ServerOptions(port=0, drain_timeout=0.0)
sys.exit(Supervisor(options, modules={"worker": "talkative"}).run())
"""
TALKATIVE = """
import os, pathlib, signal, sys
from pdserve.runtime.child import start_child
from pdserve.runtime.process_options import ChildOptions
def main():
    ctx = start_child(sys.argv, ChildOptions)
    for _ in range(4096):
        os.write(2, b"x" * 1023 + b"\\n")
    ctx.report_ready()
    pathlib.Path(os.environ["TOLD"]).write_text(str((ctx.run_dir / "admin-key").stat().st_mode & 0o777))
    while True:
        signal.pause()
"""


def prepared(code: str, shell: str = "", **env: str) -> list:
    """Run a program of ours in this environment, and return the JSON list that it prints."""
    command = ["sh", "-c", f'{shell} exec "$0" "$@"', sys.executable, "-c", PREPARED + code]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, timeout=limit(60), check=True)
    return json.loads(done.stdout)


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    code = "import signal; print(json.dumps([int(signal.getsignal(signal.SIGINT))]))"
    assert prepared(code) == [signal.SIG_DFL]
    assert prepared(code, "trap '' INT;") == [signal.SIG_IGN]


@pytest.mark.parametrize(("command", "raises"), [("version", True), ("server --help", False)])
def test_commands_that_clean_up_after_ctrl_c_can(command: str, raises: bool) -> None:
    code = f"""
import signal
from pdserve.server import cli
sys.argv[1:] = {command.split()}
cli.app = lambda **options: print(json.dumps([signal.getsignal(signal.SIGINT) is signal.default_int_handler]))
cli.main()
"""
    assert prepared(code) == [raises]


@contextmanager
def router(shell: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a router that a shell has started, and yield its URL.

    Its stderr is a small pipe, read no further than the URL.
    """
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    command = ["sh", "-c", f"{shell} exec {sys.executable} -P {ROUTER}"]
    with subprocess.Popen(command, stderr=write, env={**os.environ, **env}, process_group=0) as process:
        os.close(write)
        try:
            output = ""
            while not (found := URL.search(output)):
                said = os.read(read, 4096).decode()
                assert said, output
                output += said
            yield process, f"http://127.0.0.1:{found.group(1)}"
        finally:
            process.kill()
            os.close(read)


def is_alive(url: str) -> bool:
    try:
        return httpx.get(url + "/livez", trust_env=False, timeout=limit(10)).status_code == 200
    except httpx.TransportError:
        return False


def test_ignored_signals_stay_ignored_stray_ones_do_nothing_and_port_0_is_reported() -> None:
    with router("trap '' HUP INT; exec <&- >&-;") as (process, url):
        wait_until(lambda: is_alive(url), 20, "the router serves")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTSTP, signal.SIGCONT):
            os.killpg(process.pid, number)
        assert is_alive(url)
        assert ignored_signals(process.pid) >= {signal.SIGHUP, signal.SIGINT, signal.SIGUSR1}
        process.terminate()
        assert process.wait(limit(20)) == 0


def test_signals_that_the_parent_blocked_or_discarded_come_in() -> None:
    shown = (
        f"{PREPARED} import signal; print(json.dumps([len(signal.pthread_sigmask(0, ())), os.fork() and os.wait()[1]]))"
    )
    start = f"""
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGRTMIN))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-c", {shown!r}])
"""
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, timeout=limit(60), check=True)
    assert done.stdout.splitlines()[-1] == b"[0, 0]"


def test_one_program_s_signal_to_a_process_and_its_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    echoes = signals.EchoFilter()
    assert not echoes.is_echo(signal.SIGTERM)
    assert echoes.is_echo(signal.SIGTERM)
    assert not echoes.is_echo(signal.SIGINT)
    now[0] += 2 * signals.ECHO_SECONDS
    assert not echoes.is_echo(signal.SIGINT)


def test_an_unread_log_stops_neither_the_router_nor_its_end() -> None:
    with router("", **ASCII) as (process, url), httpx.Client(trust_env=False, timeout=limit(10)) as client:
        wait_until(lambda: is_alive(url), 20, "the router serves")
        for _ in range(100):
            assert client.get(url + "/nowhere").status_code == 404
        process.terminate()
        assert process.wait(limit(20)) == 0


def test_children_s_output_and_signals_to_all_processes_stop_no_supervisor(tmp_path: Path) -> None:
    """The child writes 4 MiB to stderr, which is not read.

    Then SIGTERM goes to every process, as systemd does. SIGHUP is ignored, as by nohup.
    """
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    output = tmp_path / "told"
    env = {**os.environ, "PYTHONPATH": with_inherited(tmp_path), "TOLD": str(output)}
    command = ["sh", "-c", """trap '' HUP; exec "$0" "$@" """, sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env, process_group=0) as process:
        try:
            wait_until(output.exists, 30, "the child has said everything")
            [child] = psutil.Process(process.pid).children()
            numbers = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
            assert ignored_signals(child.pid) >= numbers
            assert ignored_signals(process.pid) & numbers == {signal.SIGHUP, signal.SIGUSR1}
            # The supervisor may not have read that the child is ready; an end without a drain is as good.
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(limit(20)) == 0
            assert output.read_text() == str(0o600)
        finally:
            process.kill()


def test_closed_streams_are_open_on_dev_null() -> None:
    code = (
        "sys.stdout = sys.stderr; print('seen'); "
        "print(json.dumps([os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in (0, 2)]"
        " + [socket.socket().fileno() > 2, sys.stdin.read()]), file=os.fdopen(1, 'w'))"
    )
    assert prepared(code, "exec <&- 2>&-;") == [True, True, True, ""]


def test_text_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "modèle").write_text("é")
    code = f"print(json.dumps([open({str(tmp_path)!r} + '/mod\\u00e8le').read(), sys.argv[1:]]))"
    for env in (ASCII, {"LC_ALL": "C"}, {"LC_ALL": "xx_YY.UTF-8"}):
        assert prepared(code, **env) == ["é", []]
    # What the output's encoding lacks is escaped.
    assert prepared("print(json.dumps(['\\u00e9'], ensure_ascii=False).replace('\\\\', ''))") == ["é"]
    command = [sys.executable, "-c", PREPARED + "print('\\u00e9')"]
    done = subprocess.run(command, env=os.environ | ASCII, capture_output=True, check=True, timeout=limit(60))
    assert done.stdout == b"\\xe9\n"


def test_a_word_that_is_not_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pdserve", "server", "--model-path", "modèle\udcff"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_current_directory_that_was_deleted_is_left(tmp_path: Path) -> None:
    shell = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone;"
    assert prepared("print(json.dumps([os.getcwd()]))", shell) == ["/"]


def test_a_folder_for_temporary_files_that_is_too_long_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/long/" + "x" * 80)
    assert run_dir_parent() == Path("/tmp")
    monkeypatch.setattr("tempfile.tempdir", "/short")
    assert run_dir_parent() == Path("/short")
    assert list(run_dir_parent().glob("*")) == []


def test_port_0_is_a_free_one_that_no_other_process_gets() -> None:
    options, held = take_free_ports(
        ServerOptions(port=0, disaggregation_mode="prefill", disaggregation_bootstrap_port=0)
    )
    try:
        assert options.port
        assert options.own_bootstrap_port not in (0, options.port)
        check_port_free(options.host, options.port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((options.host, options.port))
        listen(options.host, options.port, 1).close()
    finally:
        for sock in held:
            sock.close()
    given = ServerOptions(port=7, disaggregation_bootstrap_port=8)
    assert take_free_ports(given) == (given, [])


def test_a_host_that_is_none_is_refused_clearly() -> None:
    with pytest.raises(supervisor.InstanceFailed, match="choose another --host"):
        take_free_ports(ServerOptions(port=0, host="192.0.2.1"))
    with pytest.raises(OSError, match="assign"):
        hold_free_port("192.0.2.1")


def test_a_port_is_released_if_there_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[socket.socket] = []

    def hold(host: str) -> socket.socket:
        if held:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        held.append(hold_free_port(host))
        return held[0]

    monkeypatch.setattr(supervisor, "hold_free_port", hold)
    options = ServerOptions(port=0, disaggregation_mode="prefill", disaggregation_bootstrap_port=0)
    with pytest.raises(supervisor.InstanceFailed, match="Too many open files"):
        take_free_ports(options)
    assert [sock.fileno() for sock in held] == [-1]


@pytest.mark.parametrize(
    "command",
    [
        "version",
        "check --help",
        *(pytest.param(words, marks=pytest.mark.slow) for words in ("completion bash", "--help")),
    ],
)
def test_an_output_that_takes_no_more_ends_a_command_without_a_traceback(command: str) -> None:
    run = [sys.executable, "-P", "-m", "pdserve.server.cli", *command.split()]
    read, write = os.pipe()
    os.close(read)
    try:
        gone = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True, timeout=limit(60))
    finally:
        os.close(write)
    assert (gone.returncode, gone.stderr) == (1, "")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, timeout=limit(60))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "No space left on device" in done.stderr
