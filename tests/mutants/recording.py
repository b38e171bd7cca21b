"""Records which tests reach which mutants, in one run of the suite with every mutant switched off."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .tree import Tree


@dataclass
class Recording:
    """``seconds``: of each test that passed. ``reached``: the tests that reach each mutant, in-process ones first."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    reached: dict[int, list[str]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it to ``path``."""
        path.write_text(json.dumps(self.__dict__))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read it."""
        found = cls(**json.loads(path.read_text()))
        found.reached = {int(number): tests for number, tests in found.reached.items()}
        return found


def record(tree: Tree, selection: Sequence[str], workers: int) -> Recording:
    """Run the tests of ``selection`` (arguments of pytest) and note what each reaches.

    A mutant reached by another process counts for every test that ran meanwhile: too many tests, never too few.
    """
    windows = tree.folder / "windows"
    shutil.rmtree(windows, ignore_errors=True)
    windows.mkdir()
    tree.log.write_text("")
    tree.switch(None)
    args = ["-q", "-p", "mutants.plugin", "--windows", str(windows), "--no-loadscope-reorder"]
    code, output = tree.run([*args, "-n", str(workers), "--dist", "loadfile", *selection])
    if code not in (0, 1):
        raise SystemExit(f"the suite can't be recorded:\n{output[-3000:]}")
    return evaluate(windows, tree.log)


def evaluate(windows: Path, log: Path) -> Recording:
    """Put the tests' windows and the mutants' times together."""
    found = Recording()
    tests: dict[int, list[tuple[str, float, float]]] = {}
    for file in windows.iterdir():
        own = tests[int(file.name)] = []
        for line in file.read_text().splitlines():
            name, begin, end, passed = json.loads(line)
            if passed:
                own.append((name, begin, end))
                found.seconds[name] = end - begin
            else:
                found.failed.append(name)
    inside: dict[int, set[str]] = defaultdict(set)
    outside: dict[int, set[str]] = defaultdict(set)
    for line in log.read_text().splitlines():
        pid, number, at = line.split()
        reached, running = (inside, [int(pid)]) if int(pid) in tests else (outside, list(tests))
        for process in running:
            reached[int(number)].update(name for name, begin, end in tests[process] if begin <= float(at) <= end)
    for number in inside.keys() | outside.keys():
        cheapest = lambda names: sorted(names, key=found.seconds.__getitem__)  # noqa: E731
        found.reached[number] = [*cheapest(inside[number]), *cheapest(outside[number] - inside[number])]
    return found
