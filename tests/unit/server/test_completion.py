"""``pdserve completion``: a real bash completes with it; other shells' scripts know every command and option."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from pdserve.server.cli import app
from pdserve.server.options import ServerOptions

# Completes the words that it is given as bash would at the last one's end.
ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
[[ $(complete -p pdserve) =~ -F\\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
COMMANDS = {"server", "router", "up", "chat", "check", "bench", "calibrate", "router-key", "completion", "version"}


@cache
def script(shell: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        assert app(["completion", shell], result_action="return_value") == 0
    return printed.getvalue()


@pytest.fixture
def bash_script(tmp_path: Path) -> Path:
    file = tmp_path / "pdserve.bash"
    file.write_text(script("bash"))
    return file


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["server", "--it"], {"--itl-budget-ms"}),
        (["ch"], {"chat", "check"}),
        ([""], COMMANDS),
        (["up", "--compute-nice", "5", "--pref"], {"--prefill"}),
        (["server", "--dtype", "bf"], {"bfloat16"}),
        (["chat", "--te"], {"--temperature"}),
        (["completion", "z"], {"zsh"}),
        (["server", "--nothing-like-it"], set()),
    ],
)
def test_bash_completes(words: list[str], offered: set[str], bash_script: Path) -> None:
    argv = ["bash", "--norc", "-c", ASK, "bash", str(bash_script), "pdserve", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


def test_bash_offers_files_where_nothing_else_is_known(bash_script: Path) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {bash_script}; complete -p pdserve"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-o default" in done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_commands_and_options(shell: str) -> None:
    text = script(shell)
    names = [name.replace("_", "-") for name in ServerOptions.__dataclass_fields__]
    assert not [name for name in (*COMMANDS, *names) if name not in text]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    file = tmp_path / "script"
    file.write_text(script(shell))
    subprocess.run([shell, "-n", str(file)], check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["completion", "tcsh"])
    assert "bash" in capsys.readouterr().err
