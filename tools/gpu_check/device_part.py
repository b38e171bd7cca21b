"""``tests/device`` on the real device: each of its files is a process of its own, so no error reaches the next file."""

from __future__ import annotations

import importlib.util
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from pdserve.runtime.python import python_command

from .part import Part, run_group
from .record import Check, Finding

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 6
"""Test processes that share the device."""
SECONDS = 400.0
"""Limit of one file."""


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each file of ``tests/device``, the smallest first.

    The function runs the tests.
    """
    files = sorted((ROOT / "tests" / "device").glob("test_*.py"), key=lambda file: file.stat().st_size)
    for file in files:
        yield f"tests/device/{file.name}", lambda f=file: run_file(part, f)  # type: ignore[misc]


GROUPS = {"tests": checks}


def run_file(part: Part, file: Path) -> Finding:
    """Run pytest on one file, for at most ``SECONDS``, and report how many tests passed and failed.

    A dry run takes one case of each test: the interpreter is slow.
    """
    if importlib.util.find_spec("pytest") is None:
        return Finding("", "not run: pytest is not installed")
    report, log = part.results / "logs" / f"{file.stem}.xml", part.log(file.stem)
    report.unlink(missing_ok=True)
    # Warnings of the machine's own versions of libraries are no finding.
    command = python_command("-m", "pytest", str(file), "-q", "-W", "ignore", "-p", "no:cacheprovider")
    command += ["-m", "not slow", f"--junit-xml={report}", "--rootdir", str(ROOT)]
    if part.dry_run:
        command += ["--one-of-each", "1"]
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Finding("", f"not over after {SECONDS:.0f} s", ok=False)
    return judge(report, status, log)


def judge(report: Path, status: int, log: Path) -> Finding:
    """Return how many tests passed, were skipped and failed, by pytest's ``report`` (JUnit XML). Name some that failed.

    ``status``: pytest's exit status. ``log``: its output.
    """
    if not report.is_file():
        lines = log.read_text(errors="replace").strip().splitlines()
        return Finding("", f"no test ran (exit status {status}): {' / '.join(lines[-2:])}"[:300], ok=False)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped = (sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "skipped"))
    failed = [
        case.get("name", "?")
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    named = f": {', '.join(failed[:5])}{' …' if len(failed) > 5 else ''}" if failed else ""
    text = f"{total - skipped - len(failed)} passed, {skipped} skipped, {len(failed)} failed{named}"
    return Finding("", text, "none failed", not failed and status == 0)


if __name__ == "__main__":
    run_group("device", GROUPS)
