"""Runs tests of tests/device in Triton's interpreter: a process has it for all kernels or for none."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .machine import limit


def interpret(files: Sequence[Path], quarter: int | None = None) -> str:
    """Run a quarter of all cases of the tests in ``files``, or a sample: one case of each test, another one each week.

    Returns what pytest printed, which names the seed. Fails with that if a test fails.
    """
    year, week, _ = datetime.date.today().isocalendar()
    if quarter is None:
        chosen = ["-m", "not slow", "--one-of-each", f"{year}-{week}"]
    else:
        chosen = ["--cases-quarter", str(quarter)]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *map(str, files)]
    done = subprocess.run(
        argv,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=limit(900),
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert " passed" in done.stdout
    return done.stdout
