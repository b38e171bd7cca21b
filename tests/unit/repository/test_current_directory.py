"""Nothing is imported from the current directory: not by our processes, not by our tools.

Every server of the end-to-end tests runs in the hostile folder, too (``support.processes``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.hostile_folder import HostileFolder, hostile_folder
from support.machine import limit
from support.product_files import ROOT, product_files

from pdserve.runtime.python import python_command

GUARD = "clean_start"
IMPORT = re.compile(r"import [\w.]+$|from (?!__future__)[\w.]+ import ")
OTHER_PYTHONS = {"sglang_side.py", "vllm_side.py"}
"""Scripts that interpreters without pdserve run. Their own folder is in front, not the current one."""
DEVELOPERS = "tools"
"""Folder of programs that run in the repository, with ``-P`` and its root in PYTHONPATH: nothing is to be dropped."""
SCRIPT = "import sys; sys.argv[0] = 'pdserve'; from pdserve.server.cli import main; main()"
"""Code that runs like the console script. The script's folder is not the current one."""


@pytest.fixture
def hostile() -> HostileFolder:
    return hostile_folder()


def run(hostile: HostileFolder, command: list[str], **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=hostile.path,
        env=hostile.environment() | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert hostile.imported() == []
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folder_is_hostile(hostile: HostileFolder) -> None:
    names = {path.stem for path in hostile.path.glob("*.py")}
    assert names > {"json", "queue", "random", "numpy", "torch", "transformers", "uvicorn", "zmq", "msgspec", "pytest"}
    command = [sys.executable, "-c", "import queue"]
    done = subprocess.run(command, cwd=hostile.path, env=hostile.environment(), stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert "queue" in hostile.imported()
    hostile.forget()


@pytest.fixture(scope="module")
def before_us(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Modules that Python imports before it runs a line of ours, in ``-m`` and in the ``.pth`` files of an
    installation.

    ``__future__`` is among them, because it must come first.
    """
    code = "import runpy, sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    names = {"__future__", "sitecustomize", "usercustomize", *output.split()}
    # Others it asks for and does not find anywhere, as _winapi on Linux. Each one that is found here hides the next.
    while asked := asked_for_at_start(tmp_path_factory.mktemp("start"), names):
        names |= asked
    return names


def asked_for_at_start(path: Path, known: set[str]) -> set[str]:
    """Return what Python imports from ``path`` before it runs a line of ours, beside ``known``."""
    folder = HostileFolder(path, without=known)
    env = folder.environment() | {"PYTHONPATH": str(path)}
    subprocess.run([sys.executable, "-P", "-c", ""], cwd=path, env=env, stderr=subprocess.DEVNULL, check=False)
    return set(folder.imported())


def test_a_command_runs_there_as_a_user_types_it(tmp_path: Path, before_us: set[str]) -> None:
    """Without ``-P``, Python puts the folder in front."""
    assert run(HostileFolder(tmp_path, without=before_us), [sys.executable, "-m", "pdserve.server.cli", "--help"])


def test_the_console_script_runs_there(hostile: HostileFolder) -> None:
    assert run(hostile, [sys.executable, "-P", "-c", SCRIPT, "completion", "bash"])


def test_a_child_runs_there(hostile: HostileFolder) -> None:
    assert str(hostile.path) not in run(hostile, python_command("-c", "import queue, sys; print(sys.path)"))


def test_an_empty_entry_of_pythonpath_lets_nothing_in(tmp_path: Path, before_us: set[str]) -> None:
    """The usual ``PYTHONPATH=$PYTHONPATH:/folder``, in a shell that has none."""
    code = f"import sys; sys.argv[0] = 'pdserve'; from pdserve.runtime import {GUARD}; import queue, os; "
    folder = HostileFolder(tmp_path, without=before_us)
    command = [sys.executable, "-P", "-c", code + "print(sys.path, os.environ['PYTHONPATH'])"]
    output = run(folder, command, PYTHONPATH=f"{os.pathsep}/opt/lib")
    assert str(tmp_path) not in output
    assert "'/opt/lib'" in output
    assert output.split()[-1] == "/opt/lib"


def test_every_program_drops_the_current_directory_before_it_imports_anything() -> None:
    unguarded = []
    programs = 0
    for path in product_files():
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' not in text or path.name in OTHER_PYTHONS:
            continue
        programs += 1
        if path.relative_to(ROOT).parts[0] == DEVELOPERS:
            continue
        first = next(line for line in text.splitlines() if IMPORT.match(line))
        if GUARD not in first:
            unguarded.append(str(path.relative_to(ROOT)))
    assert programs > 30
    assert unguarded == []


def test_every_python_is_started_by_the_one_function_that_leaves_the_current_directory_out() -> None:
    started = re.compile(r"""(executable|python["']?\)?)\s*,\s*["']-[mc]["']""")
    places = [
        str(path.relative_to(ROOT)) for path in product_files() if started.search(path.read_text(encoding="utf-8"))
    ]
    assert places == []
    scripts = [ROOT / "Makefile", ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cuda", ROOT / ".ci/demo.sh"]
    for script in scripts:
        assert not re.search(r"python3? -[mc]\b", script.read_text(encoding="utf-8")), script
