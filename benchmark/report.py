"""What a benchmark leaves: the table in the terminal, and the JSON file."""

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

from .metrics import MS, Distribution, GroupReport, RunReport
from .options import BenchOptions
from .record import RequestRecord
from .runner import RunResult

MAX_ERRORS_SHOWN = 5
_LATENCIES = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))


def print_run(console: Console, report: RunReport) -> None:
    """Print the tables of one load, its failed requests, and what the load generator itself took."""
    groups = [report.total] if len(report.groups) == 1 else [*report.groups, report.total]
    console.print(_rates_table(report, groups))
    console.print(_latency_table(groups))
    for group in groups if len(groups) == 1 else report.groups:
        _print_problems(console, group, len(groups) > 1)
    cost = report.client
    per_token = "" if cost.cpu_us_per_token is None else f", {cost.cpu_us_per_token:.0f} µs a token"
    late = f", requests sent up to {cost.max_lag:.1f} ms late" if cost.max_lag >= 1 else ""
    console.print(f"[dim]this client: {cost.cpu_seconds:.2f} s of CPU{per_token}{late}[/dim]")


def _rates_table(report: RunReport, groups: Sequence[GroupReport]) -> Table:
    table = Table(title=f"{report.label}, {report.window:.1f} s", title_justify="left")
    table.add_column("", no_wrap=True)
    for group in groups:
        table.add_column(group.name, justify="right")
    rows = {
        "requests complete / failed": [f"{g.completed} / {g.failed}" for g in groups],
        "requests/s": [f"{g.request_throughput:.2f}" for g in groups],
        "input tokens/s": [f"{g.input_throughput:,.1f}" for g in groups],
        "output tokens/s": [f"{g.output_throughput:,.1f}" for g in groups],
        "input tokens, cached": [f"{g.input_tokens:,}, {_optional(g.cached_tokens, ',')}" for g in groups],
        "output tokens, a chunk": [f"{g.output_tokens:,}, {_optional(g.tokens_per_chunk, '.2f')}" for g in groups],
        "concurrency mean / peak": [f"{g.mean_concurrency:.1f} / {g.peak_concurrency}" for g in groups],
    }
    if any(g.goodput is not None for g in groups):
        rows["goodput requests/s"] = [
            f"{_optional(g.goodput, '.2f')} ({_optional(g.slo_share, '.0%')})" for g in groups
        ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _latency_table(groups: Sequence[GroupReport]) -> Table:
    table = Table("ms", *[""] * (len(groups) > 1))
    for name in ("mean", "median", "P90", "P99", "max"):
        table.add_column(name, justify="right")
    for title, key in _LATENCIES:
        for group in groups:
            values: Distribution | None = getattr(group, key)
            if values is None:
                continue
            cells = (values.mean, values.median, values.p90, values.p99, values.max)
            table.add_row(title, *[group.name] * (len(groups) > 1), *map(_milliseconds, cells))
    return table


def _print_problems(console: Console, group: GroupReport, is_named: bool) -> None:
    where = f"{group.name}: " if is_named else ""
    for error, count in list(group.errors.items())[:MAX_ERRORS_SHOWN]:
        # Escaped: an error's text may hold brackets, which the console would take for colours.
        console.print(f"[red]{where}{count} failed:[/red] {escape(error)}", highlight=False)
    if len(group.errors) > MAX_ERRORS_SHOWN:
        console.print(f"[red]{where}… and {len(group.errors) - MAX_ERRORS_SHOWN} other errors[/red]")
    if group.short_answers:
        console.print(f"[yellow]{where}{group.short_answers} answers are shorter than asked for[/yellow]")


def _milliseconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def write_json(path: Path, options: BenchOptions, runs: Sequence[tuple[RunResult, RunReport]], details: bool) -> None:
    """Write one JSON object: ``options``, and for each load its ``report`` and its ``requests``.

    The API key is masked. ``details``: also write the time of every chunk.
    """
    given = dataclasses.asdict(options)
    # A file of results gets passed around; a key must not.
    given["api_key"] = None if options.api_key is None else "***"
    content = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": given,
        "runs": [
            {"report": report, "requests": [_request(record, details) for record in result.records]}
            for result, report in runs
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=1))


def _request(record: RequestRecord, details: bool) -> dict[str, Any]:
    """Make the entry of a request, with times in seconds from the run's start and latencies in ms.

    The latencies of a failed request are None. ``details``: also list the time and the tokens of each chunk.
    """
    is_good = record.error is None
    content: dict[str, Any] = {
        "group": record.group,
        "due": record.due,
        "sent": record.sent,
        "ended": record.ended,
        "ttft": record.ttft * MS if is_good else None,
        "e2e": record.e2e * MS if is_good else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "error": record.error,
    }
    if details:
        content |= {"chunk_times": list(record.chunk_times), "chunk_tokens": list(record.chunk_tokens)}
    return content
