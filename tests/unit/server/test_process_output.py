"""Where the output of a cluster's processes goes: to standard error, or to a file for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from support.machine import limit
from support.processes import wait_until

from pdserve.server.cluster_process import ForwardedOutput, LoggedOutput, ProcessOutput
from pdserve.server.log_folder import LogFolder


def run(output: ProcessOutput) -> None:
    """Run a process that writes to both of its outputs."""

    def spawn(stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
        code = "import os; os.write(1, b'one\\n'); os.write(2, b'two\\n')"
        return subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.STDOUT)

    assert output.attach("decode", spawn).wait(limit(30)) == 0


def test_a_log_folder_gets_a_file_for_each_process(tmp_path: Path) -> None:
    run(LoggedOutput(LogFolder(tmp_path)))
    assert (tmp_path / "decode.log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(("named", "prefix"), [(True, "decode     | "), (False, "")])
def test_lines_are_forwarded_with_the_name_of_the_process_if_they_are_text(
    named: bool, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[bytes, str]] = []

    def copy(pipe: IO[bytes], prefix: str) -> None:
        with pipe:
            lines.append((pipe.read(), prefix))

    monkeypatch.setattr("pdserve.server.cluster_process.copy_to_stderr", copy)
    run(ForwardedOutput(named_lines=named))
    wait_until(lambda: lines, 30, "the output is forwarded")
    assert lines == [(b"one\ntwo\n", prefix)]
