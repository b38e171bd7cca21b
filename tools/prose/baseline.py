"""The committed counts of findings that each file may still have. They only fall.

The file has one line for each source file, so that branches which lower different files merge without a conflict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from .check import Counts, Report
from .rules import RULES

PATH = "tools/prose/baseline.json"

Baseline = dict[str, dict[str, int]]
"""Allowed findings by file and rule. A file that is missing may have none."""


def load(root: Path) -> Baseline:
    """Read the numbers of findings that each file may have, from the committed file below ``root``.

    Without that file nothing is allowed. Raises ``SystemExit`` for one that is not JSON.
    """
    file = root / PATH
    try:
        baseline: Baseline = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except json.JSONDecodeError as e:
        raise SystemExit(f"prose: {PATH}: {e}; after a merge conflict take either side, then run --update") from e
    return baseline


def save(root: Path, baseline: Baseline) -> None:
    """Write the baseline's file below ``root``, one line for each source file that may have findings."""
    kept = {path: {r.name: counts[r.name] for r in RULES if counts.get(r.name)} for path, counts in baseline.items()}
    lines = [f"{json.dumps(path)}: {json.dumps(counts)}" for path, counts in sorted(kept.items()) if counts]
    (root / PATH).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def lowered(baseline: Baseline, reports: Sequence[Report]) -> Baseline:
    """Return the baseline with every number lowered to the findings that are left.

    Files that are gone leave their allowance to files of the same top-level folder that exceed theirs, because their
    text may have moved there.
    """
    present = {report.path: report.counts for report in reports}
    result = {path: dict(allowed) for path, allowed in baseline.items()}
    for path in [path for path in baseline if path not in present]:
        for report in reports:
            if _room(report.path) == _room(path):
                excess = report.excess(result.get(report.path, {}))
                _transfer(result[path], result.setdefault(report.path, {}), {}, excess)
    return {path: _least(allowed, present[path]) for path, allowed in result.items() if path in present}


def _room(path: str) -> str:
    return path.partition("/")[0]


def _least(allowed: Counts, counts: Counts) -> dict[str, int]:
    return {name: min(number, counts.get(name, 0)) for name, number in allowed.items()}


def moved(baseline: Baseline, reports: Sequence[Report], old: str, new: str) -> Baseline:
    """Return the baseline after text went from ``old`` to ``new``: two files, or two folders with files of equal names.

    ``new`` gets what it needs of the allowance that ``old`` no longer uses, so no total rises.
    """
    present = {report.path: report for report in reports}
    result = {path: dict(counts) for path, counts in baseline.items()}
    for path in [path for path in baseline if path == old or path.startswith(old.rstrip("/") + "/")]:
        target = new + path.removeprefix(old) if path == old else new.rstrip("/") + path.removeprefix(old.rstrip("/"))
        if target in present:
            used = present[path].counts if path in present else {}
            needed = present[target].excess(result.get(target, {}))
            _transfer(result[path], result.setdefault(target, {}), used, needed)
    return result


def _transfer(source: dict[str, int], target: dict[str, int], used: Counts, needed: Mapping[str, int]) -> None:
    for name, number in needed.items():
        given = min(number, max(source.get(name, 0) - used.get(name, 0), 0))
        source[name] = source.get(name, 0) - given
        target[name] = target.get(name, 0) + given
