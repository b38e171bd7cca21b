"""What ``pdserve bench transfer`` leaves: a table for each page size, and the JSON file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import TransferBenchOptions
from .results import CaseResult, TransferResults

COLUMNS = ("GB/s", "of memcpy", "of raw", "unhashed GB/s", "checksum ms/GiB", "verify GB/s")


def print_cases(console: Console, results: Sequence[CaseResult]) -> None:
    """Print one table of ``results``, which are all of one page size."""
    table = Table(title=f"pages of {results[0].case.page_bytes:,} bytes", title_justify="left")
    for name in ("request", "pages", "moved by"):
        table.add_column(name, no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for result in results:
        case = result.case
        heads = [f"{case.request_mib:g} MiB", f"{case.num_pages:,} {case.contiguity}"]
        for way in result.rounds:
            figures = result.figures(way)
            table.add_row(
                *heads,
                way.label,
                _rate(figures.rate),
                _optional(figures.of_memcpy, ".0%"),
                _optional(figures.of_raw, ".0%"),
                _rate(figures.unhashed_rate),
                _optional(figures.checksum_ms, ",.0f"),
                _rate(figures.verify_rate),
            )
            heads = ["", ""]
        table.add_section()
    console.print(table)


def print_problems(console: Console, results: TransferResults) -> None:
    """Print what is missing in the tables: what is not installed or failed, and why."""
    for what, colour, problems in (("left out", "yellow", results.left_out), ("failed", "red", results.failed)):
        for name, reason in problems.items():
            # Escaped: "pdserve[nixl]" would be taken for a colour.
            text = f"[{colour}]{what}: {name}:[/{colour}] {escape(reason)}"
            console.print(text, highlight=False, soft_wrap=True)


def write_json(path: Path, options: TransferBenchOptions, results: TransferResults) -> None:
    """Write one JSON object: ``options``, ``cases`` with their figures and rounds (seconds), ``left_out`` and
    ``failed``.
    """
    content = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": dataclasses.asdict(options),
        "cases": [_case(result) for result in results.cases],
        "left_out": results.left_out,
        "failed": results.failed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=1))


def _case(result: CaseResult) -> dict[str, Any]:
    case = result.case
    ways = {
        way.label: {**result.figures(way)._asdict(), "rounds": [seconds._asdict() for seconds in rounds]}
        for way, rounds in result.rounds.items()
    }
    return {**case._asdict(), "nbytes": case.nbytes, "moved_by": ways}


def _rate(value: float | None) -> str:
    return _optional(value, ".2f")


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
