"""A copy of the repository in an environment of its own; its ``pdserve`` has the mutants.

The copy's processes find it by the environment's own files, not by a variable: a process that ignores its environment
variables still runs the mutant.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from .sites import ROOT, Site, plant

SWITCHES = '''"""Says which mutant runs. Without one, each use of a switch is noted."""

import os
import time

_ON = {on!r}
_LOG = None if _ON is not None else os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_noted = {{}}
_clock, _pid, _write = time.monotonic, os.getpid, os.write


def is_on(number):
    """Whether this mutant runs."""
    if _LOG is not None:
        now = _clock()
        if now - _noted.get(number, -1.0) > 0.02:
            _noted[number] = now
            _write(_LOG, f"{{_pid()}} {{number}} {{now:.4f}}\\n".encode())
    return number == _ON


def forget():
    """Note every switch again: another test begins."""
    _noted.clear()
'''


class Tree:
    """One copy, in ``folder``; a test run at a time."""

    def __init__(self, folder: Path, sites: Sequence[Site]) -> None:
        self.folder = folder
        self.log = folder / "switches.log"
        self.root = folder / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        planted: dict[str, dict[int, Site]] = defaultdict(dict)
        for number, site in enumerate(sites):
            planted[site.path][number] = site
        for path, own in planted.items():
            (self.root / path).write_text(plant((ROOT / path).read_text(), own))
        venv.create(self.root / ".venv", symlinks=True)
        self.python = str(self.root / ".venv" / "bin" / "python")
        [self.packages] = (self.root / ".venv" / "lib").glob("python*/site-packages")
        (self.packages / "packages.pth").write_text(
            "\n".join([str(self.root / ".ns"), *(path for path in sys.path if path.endswith("site-packages"))])
        )
        self.switch(None)

    def switch(self, number: int | None) -> None:
        """Run mutant ``number`` from now on; None: the unchanged product, with the reached switches logged."""
        (self.packages / "mutant_switch.py").write_text(SWITCHES.format(on=number, log=str(self.log)))

    def run(self, args: Sequence[str], seconds: float | None = None) -> tuple[int | None, str]:
        """Run pytest; its exit code, or None after ``seconds``, and what it printed."""
        env = {**os.environ, "PYTHONPATH": "tests", "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        argv = [self.python, "-m", "pytest", "-p", "no:cacheprovider", *args]
        output = self.folder / "output"
        with output.open("wb") as out:
            child = subprocess.Popen(
                argv, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child.pid)
                child.wait()
        return code, output.read_text(errors="replace")


def _end(pid: int) -> None:
    """End a process that still runs and everything that it has started."""
    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
