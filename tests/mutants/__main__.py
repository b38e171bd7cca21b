"""What ``make mutants`` runs: draws mutants over all rooms, runs the tests that reach each, and says which survive.

Each mutant is first run against the tests of ``make test``. Survivors are run against the tests that ``make test`` ran
before, as ``--before`` lists them: a mutant that only those kill is a loss. Results are lines of JSON; a run that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .recording import Recording, record
from .sites import Site, all_sites, draw
from .tree import Tree

BOOT_SECONDS = 60.0
"""Allowance for the start of pytest, on a busy machine."""
MOST_SECONDS = 100.0
"""Tests that reach a mutant are run, the cheapest first, until they would take this long together."""


def options() -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--count", type=int, default=100, help="mutants")
    parser.add_argument("--within", nargs="+", default=[""], help="draw from files of these rooms or folders alone")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--minutes", type=float, default=25.0, help="no mutant is begun later; recording not counted")
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/e2e"], help="files or folders of tests")
    parser.add_argument("--before", type=Path, help="file of test ids, one a line, that make test ran before")
    parser.add_argument("--out", type=Path, default=Path(".mutants"), help="folder of the recording and the results")
    return parser.parse_args()


def selected(tests: Sequence[str], recording: Recording) -> list[str]:
    """Return the ``tests`` that are run: as many as the time allows, at least the cheapest."""
    total, chosen = 0.0, []
    for test in tests:
        total += recording.seconds[test]
        if chosen and total > MOST_SECONDS:
            break
        chosen.append(test)
    return chosen


class Campaign:
    """Runs mutants against tests and notes the verdicts."""

    def __init__(self, sites: list[Site], recording: Recording, now: set[str], results: Path) -> None:
        self.sites = sites
        self.recording = recording
        self.now = now
        """Tests of ``make test``; the others were moved."""
        self.results = results

    def judge(self, number: int, tree: Tree) -> dict[str, Any]:
        """Find out what kills a mutant: nothing, a test of ``make test``, or only one that was moved."""
        site = self.sites[number]
        reached = self.recording.reached.get(number, [])
        entry: dict[str, Any] = {"mutant": site.key, "before": site.before, "reached by": len(reached)}
        if not reached:
            return entry | {"verdict": "not reached"}
        ran = 0
        for kind, tests in (
            ("make test", [test for test in reached if test in self.now]),
            ("moved", [test for test in reached if test not in self.now]),
        ):
            chosen = selected(tests, self.recording)
            ran += len(chosen)
            if chosen and (killer := self.killer(number, chosen, tree)):
                return entry | {"verdict": f"killed by {kind}", "by": killer}
        return entry | {"verdict": "survived", "ran": ran}

    def killer(self, number: int, tests: list[str], tree: Tree) -> str:
        """Return the first failure of ``tests`` with the mutant, or ""."""
        tree.switch(number)
        listed = tree.folder / "tests"
        listed.write_text("\n".join(tests))
        seconds = BOOT_SECONDS + 4 * sum(self.recording.seconds[test] for test in tests)
        code, output = tree.run(["-q", "-x", "-n0", f"@{listed}"], seconds)
        if code == 0:
            return ""
        failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failures[0][:300] if failures else f"time ({seconds:.0f} s)" if code is None else f"exit code {code}"

    def run(self, trees: list[Tree], minutes: float) -> None:
        """Judge the mutants that have no verdict yet."""
        done = {entry["mutant"] for entry in read(self.results)}
        todo = [number for number, site in enumerate(self.sites) if site.key not in done]
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free.put(tree)
        ends_at = time.monotonic() + 60 * minutes

        def one(number: int) -> None:
            if time.monotonic() > ends_at:
                return
            tree = free.get()
            begin = time.monotonic()
            try:
                entry = self.judge(number, tree) | {"seconds": round(time.monotonic() - begin, 1)}
            finally:
                free.put(tree)
            with self.results.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(f"{entry['verdict']:20} {entry['mutant']}", flush=True)

        with ThreadPoolExecutor(len(trees)) as pool:
            list(pool.map(one, todo))


def read(results: Path) -> list[dict[str, Any]]:
    """Read the verdicts so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def collected(tree: Tree, marks: str, tests: Sequence[str]) -> set[str]:
    """Names of the tests with these marks; a file that can't be imported has none."""
    code, output = tree.run(["-q", "--collect-only", "-n0", "-m", marks, *tests])
    found = {line for line in output.splitlines() if line.startswith("tests/") and "::" in line}
    if code != 0:
        print(output[-500:], file=sys.stderr)
    if not found:
        raise SystemExit("no test can be collected")
    return found


def prepare(args: argparse.Namespace, tree: Tree) -> tuple[Recording, set[str]]:
    """Read the recording of these mutants, or make it."""
    saved, listed = args.out / "recording.json", args.out / "make_test.json"
    now = set(json.loads(listed.read_text())) if listed.exists() else collected(tree, "not slow", args.tests)
    listed.write_text(json.dumps(sorted(now)))
    if not saved.exists():
        before = set(args.before.read_text().splitlines()) if args.before else set()
        moved = before & collected(tree, "slow", args.tests) if before else before
        tests = tree.folder / "tests"
        tests.write_text("\n".join(sorted(now | moved)))
        print(f"recording {len(now)} tests of make test and {len(moved)} that were moved", flush=True)
        begin = time.monotonic()
        record(tree, [f"@{tests}"], args.workers + 1).save(saved)
        print(f"recorded in {time.monotonic() - begin:.0f} s", flush=True)
    return Recording.load(saved), now


def main() -> int:
    """Run the campaign. Returns 0 if no mutant is killed by moved tests alone."""
    args = options()
    args.out = args.out.absolute() / f"seed-{args.seed}-{args.count}"
    args.out.mkdir(parents=True, exist_ok=True)
    sites = draw([s for s in all_sites() if s.path.startswith(tuple(args.within))], args.count, args.seed)
    drawn = args.out / "drawn.json"
    text = json.dumps([site.key for site in sites], indent=1)
    if drawn.exists() and drawn.read_text() != text:
        print(f"the product has changed since {args.out} was begun; remove it to begin again", file=sys.stderr)
        return 2
    drawn.write_text(text)
    folder = Path(tempfile.mkdtemp(prefix="pdserve-mutants-"))
    try:
        trees = [Tree(folder / str(i), sites) for i in range(args.workers)]
        recording, now = prepare(args, trees[0])
        print(f"seed {args.seed}: {len(sites)} mutants; {len(recording.failed)} tests fail or are skipped unchanged")
        Campaign(sites, recording, now, args.out / "results.jsonl").run(trees, args.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    entry = read(args.out / "results.jsonl")
    for verdict, number in sorted(Counter(one["verdict"] for one in entry).items()):
        print(f"{number:4} {verdict}")
    print(f"{len(sites) - len(entry):4} without a verdict yet")
    return int(any(one["verdict"] == "killed by moved" for one in entry))


if __name__ == "__main__":
    sys.exit(main())
