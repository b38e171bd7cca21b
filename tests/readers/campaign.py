"""Runs workers over the cases of readers, and starts another one after a case that ended its worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .cases import LIMITED_READERS, READERS

STUCK_SECONDS = 120.0
"""Maximum time without a new case. A worker that computes ends earlier, by its own limit."""
TURN = 5000
"""Cases of one worker, after which the campaign looks at the clock again."""


class Work(NamedTuple):
    """The cases of a reader from ``first`` to before ``end``, as far apart as its ``step`` says."""

    reader: str
    first: int
    end: int

    @property
    def numbers(self) -> range:
        """Return the numbers of the cases."""
        return range(self.first, self.end, READERS[self.reader].step)


class Failure(NamedTuple):
    """A case that was not read or refused as it should be."""

    reader: str
    case: int
    wrong: str


class Report(NamedTuple):
    """``cases`` files were read in ``seconds``.

    ``limited``: those that took too much, and were read again within the product's own limits.
    """

    cases: int
    seconds: float
    limited: int
    failures: list[Failure]

    def __str__(self) -> str:
        kinds = Counter(failure.wrong[:60] for failure in self.failures).most_common(12)
        rate = self.cases / self.seconds
        line = f"{self.cases} files, {rate:.0f}/s, {self.limited} limited, {len(self.failures)} failures"
        return "\n".join([line, *(f"  {count} × {wrong}" for wrong, count in kinds)])


def campaign(reader: str, seed: int, first: int, count: int, folder: Path, seconds: float) -> Report:
    """Read the cases of one reader from ``first`` on, until there are ``count`` or the time is over."""
    begun, at = time.monotonic(), first
    cases, limited, failures = 0, 0, list[Failure]()
    while at < first + count and time.monotonic() < begun + seconds:
        until = min(first + count, at + TURN)
        report = run([Work(reader, at, until)], seed, folder)
        cases += report.cases
        limited += report.limited
        failures += report.failures
        at = until
    return Report(cases, time.monotonic() - begun, limited, failures)


def run(todo: Sequence[Work], seed: int, folder: Path) -> Report:
    """Read all cases of ``todo``. A case that ends its worker is a failure.

    If its reader may take too much, the case is read again within the product's own limits.
    """
    begun = time.monotonic()
    limited, failures, left = 0, list[Failure](), list(todo)
    while left:
        ended_by, found = _read(left, seed, folder)
        failures += found
        if ended_by is None:
            break
        name, number = (folder / "case").read_text().split()
        if ended_by is signal.SIGPROF and name in LIMITED_READERS:
            limited += 1
            left.append(Work(LIMITED_READERS[name], int(number), int(number) + 1))
        else:
            failures.append(Failure(name, int(number), f"ended by {ended_by.name}"))
        at = next(i for i, work in enumerate(left) if work.reader == name and int(number) in work.numbers)
        left = [left[at]._replace(first=int(number) + READERS[name].step), *left[at + 1 :]]
    return Report(sum(len(work.numbers) for work in todo), time.monotonic() - begun, limited, failures)


def _read(todo: Sequence[Work], seed: int, folder: Path) -> tuple[signal.Signals | None, list[Failure]]:
    """Run one worker; returns the signal that ended it, if one did, and its failures."""
    for work in todo:
        (folder / work.reader).mkdir(parents=True, exist_ok=True)
    entries = [f"{work.reader}:{work.first}:{work.end}" for work in todo]
    command = [sys.executable, "-P", "-m", "readers.worker", str(folder), str(seed), *entries]
    tests = str(Path(__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0", "PYTHONPATH": tests}
    with (folder / "out").open("w") as out, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)
        _wait(process, folder / "case")
    if process.returncode > 0:
        raise RuntimeError(f"a worker ended: {(folder / 'errors').read_text()[-3000:]}")
    found = [Failure(**json.loads(line)) for line in (folder / "out").read_text().splitlines()]
    return (signal.Signals(-process.returncode) if process.returncode else None), found


def _wait(process: subprocess.Popen[bytes], case: Path) -> None:
    """Wait until the worker has ended, and end it if it stays at one case."""
    last = b""
    while process.poll() is None:
        try:
            process.wait(timeout=STUCK_SECONDS)
        except subprocess.TimeoutExpired:
            now = case.read_bytes() if case.is_file() else b""
            if now == last:
                process.kill()
            last = now


def work_of_all(count: int) -> list[Work]:
    """Return the first ``count`` cases of every reader."""
    return [Work(name, 0, count) for name in READERS]
