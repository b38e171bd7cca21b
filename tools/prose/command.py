"""Checks the language of docstrings, comments, help texts and pages.

Without arguments it fails where a file has more findings than ``tools/prose/baseline.json`` allows. A new file may
have none, except for one word for people in 1,000 words.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from . import baseline
from .check import Report, read_repository
from .rules import RULES, WHO

MAX_SHOWN = 12
"""Findings of one rule shown for one file."""


def main(arguments: list[str] | None = None) -> int:
    """Check the prose of the repository, or do what the options ask for. Return the exit code.

    It is 1 if a file has more findings than it may have.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", help="list every finding in these files and folders, and change nothing")
    parser.add_argument(
        "--update", action="store_true", help="lower the baseline to what is left, after moves within a folder too"
    )
    parser.add_argument(
        "--move", nargs=2, metavar=("OLD", "NEW"), help="let text that moved to another folder keep its allowance"
    )
    parser.add_argument("--figures", action="store_true", help="print the counts of each top-level folder")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    options = parser.parse_args(arguments)
    reports = read_repository(options.root)
    if options.figures:
        print(_figures(reports))
        return 0
    if options.paths:
        chosen = [report for report in reports if _is_chosen(report.path, options.paths)]
        print("\n".join(line for report in chosen for line in _lines(report, report.counts, len(report.findings))))
        return 0
    allowed = baseline.load(options.root)
    if options.move:
        allowed = baseline.moved(allowed, reports, *(path.rstrip("/") for path in options.move))
        baseline.save(options.root, allowed)
    if options.update:
        allowed = baseline.lowered(allowed, reports)
        baseline.save(options.root, allowed)
    return _compare(reports, allowed)


def _compare(reports: list[Report], allowed: baseline.Baseline) -> int:
    failed = 0
    for report in reports:
        limits = allowed.get(report.path, {})
        excess = report.excess(limits)
        failed += bool(excess)
        print("".join(f"{line}\n" for line in _lines(report, excess, MAX_SHOWN)), end="")
        for name, number in excess.items():
            have = report.counts[name]
            print(f"{report.path}: {name}: {have}, {number} more than allowed; rewrite {number} of them")
    if failed:
        print(f"prose: {failed} files have more findings than {baseline.PATH} allows; docs/glossary.md has the words")
    spare = sum(sum(limits.values()) for limits in allowed.values()) - sum(len(report.findings) for report in reports)
    if spare > 0 and not failed:
        print(f"prose: {spare} findings fewer than {baseline.PATH} allows; lower it with --update")
    return int(failed > 0)


def _lines(report: Report, rules: Counter[str] | dict[str, int], limit: int) -> list[str]:
    lines = []
    for rule in RULES:
        found = [finding for finding in report.findings if finding.rule is rule and rules.get(rule.name)]
        lines += [f'{report.path}:{f.line}: {rule.name}: "{f.phrase}": {f.advice}' for f in found[:limit]]
        lines += [f"{report.path}: {rule.name}: and {len(found) - limit} more"] if len(found) > limit else []
    return lines


def _is_chosen(path: str, chosen: list[str]) -> bool:
    wanted = [name.removeprefix("./").rstrip("/") for name in chosen]
    return any(path == name or path.startswith(f"{name}/") for name in wanted)


def _figures(reports: list[Report]) -> str:
    rooms: dict[str, Counter[str]] = {}
    for report in reports:
        folder = report.path.split("/")[0] if "/" in report.path else "(pages)"
        for room in (folder, "total"):
            rooms.setdefault(room, Counter()).update(report.counts + Counter({"words": report.words}))
    names = ["words", *(rule.name for rule in RULES), "who/1000"]
    lines = [f"{'':16}" + "".join(f"{name:>11}" for name in names)]
    for room in sorted(rooms, key=lambda room: (room == "total", room)):
        counts = rooms[room]
        share = 1000 * counts[WHO.name] / max(counts["words"], 1)
        lines.append(f"{room:16}" + "".join(f"{counts[name]:>11,}" for name in names[:-1]) + f"{share:>11.1f}")
    return "\n".join(lines)
