"""``pdserve chat`` as a process of its own: through pipes, in a terminal, and under Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.machine import limit
from support.web_server import Connection, refusing_port, web_server

CHAT = "/v1/chat/completions"
COMMAND = [sys.executable, "-m", "pdserve.server.cli", "chat", "--url"]
SECONDS = 30
# As a user has it: Python keeps what it prints until a line ends, or longer.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"TERM": "xterm"}
PASTES_TOGETHER = "\x1b[?2004h"
"""Asks the terminal to say where pasted text begins and ends."""


def models(connection: Connection) -> None:
    connection.answer(200, {"data": [{"id": "smol"}]})


def echo(connection: Connection) -> None:
    """Says what it was asked last."""
    connection.begin_stream()
    connection.event({"choices": [{"delta": {"content": f"<{connection.body['messages'][-1]['content']}>"}}]})
    connection.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    connection.send(b"data: [DONE]\n\n")


class Endless:
    """Begins an answer and never ends it; later questions are echoed. ``dropped``: the client went."""

    def __init__(self) -> None:
        self.dropped = threading.Event()
        self._asked = 0

    def __call__(self, connection: Connection) -> None:
        self._asked += 1
        if self._asked > 1:
            return echo(connection)
        connection.begin_stream()
        connection.event({"choices": [{"delta": {"content": "partial"}}]})
        connection.wait_until_dropped()
        self.dropped.set()


def hear_ctrl_c() -> None:
    """Handle SIGINT in a child, before it starts.

    A test run in the background ignores SIGINT, and its children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(*args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], input=typed, capture_output=True, text=True, timeout=limit(SECONDS), env=ENV, check=False
    )


def test_through_pipes_answers_stand_alone_on_stdout() -> None:
    with web_server({"/v1/models": models, CHAT: echo}) as server:
        done = run(server.url, "--max-tokens", "9", typed="one\ntwo")
    assert (done.returncode, done.stdout) == (0, "<one>\n<two>\n")
    assert done.stderr.count("finish reason stop") == 2
    assert "\x1b" not in done.stdout + done.stderr
    assert [body["max_completion_tokens"] for body in server.asked(CHAT)] == [9, 9]


def test_a_failure_is_one_line_and_the_exit_code(tmp_path: Path) -> None:
    with refusing_port() as port:
        done = run(f"http://127.0.0.1:{port}", typed="one\n")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert "pdserve up" in line
    done = run("http://127.0.0.1:1", "--api-key-file", str(tmp_path / "none"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_through_a_pipe_ends_the_program() -> None:
    endless = Endless()
    with web_server({"/v1/models": models, CHAT: endless}) as server:
        process = subprocess.Popen(
            [*COMMAND, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENV,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], limit(SECONDS))[0]
            assert process.stdout.read(7) == "partial"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=limit(SECONDS))
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert endless.dropped.wait(limit(SECONDS))


# Makes its standard input the terminal that controls it, so that a typed Ctrl-C is a SIGINT, and becomes the command.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *COMMAND, url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=ENV,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        os.close(theirs)
        self._shown = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until ``text`` has been shown since the last call."""
        assert self.shows(text, limit(SECONDS)), f"{text!r} is not shown: {self._shown!r}"
        self._shown = self._shown.partition(text)[2]

    def shows(self, text: str, seconds: float) -> bool:
        """Return whether ``text`` is shown within ``seconds``."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self._shown += os.read(self._fd, 4096).decode()
        return True

    def press_ctrl_c_until(self, done: Callable[[], bool]) -> None:
        """Press Ctrl-C again and again until ``done``, as a user does that sees no effect.

        A signal just before Python begins to wait is noticed only when the wait ends. A machine with other work can
        stop it there for as long as a test takes to type.
        """
        deadline = time.monotonic() + limit(SECONDS)
        self.type("\x03")
        while not done():
            assert time.monotonic() < deadline, f"not interrupted: {self._shown!r}"
            self.type("\x03")

    def close(self) -> None:
        """End what is left of it."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.mark.timeout(120)
def test_ctrl_c_in_a_terminal_ends_the_answer_and_no_more() -> None:
    endless = Endless()
    with web_server({"/v1/models": models, CHAT: endless}) as server, closing(Terminal(server.url)) as at:
        at.wait_for("smol at http://")
        at.wait_for("> ")
        at.type("one\n")
        at.wait_for("partial")
        at.press_ctrl_c_until(lambda: endless.dropped.wait(1))
        at.wait_for("stopped")
        at.wait_for("> ")
        # At the prompt it ends nothing either.
        at.type("half a line")
        at.wait_for("half a line")
        at.press_ctrl_c_until(lambda: at.shows("Ctrl-D leaves", 1))
        at.wait_for(f"{PASTES_TOGETHER}> ")
        # Several lines that are pasted are one message.
        at.type("\x1b[200~two\nthree\x1b[201~\n")
        at.wait_for("<two")
        at.wait_for("finish reason stop")
        at.wait_for("> ")
        at.type("\x04")
        assert at.process.wait(limit(SECONDS)) == 0
        assert [m["content"] for m in server.asked(CHAT)[1]["messages"]] == ["one", "partial", "two\nthree"]
