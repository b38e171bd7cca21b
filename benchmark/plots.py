"""PNG plots of a benchmark: latency distributions, throughput over time, TTFT against load."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PlotsUnavailable
from .metrics import MS, RunReport
from .record import RequestRecord
from .runner import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Sequence[tuple[RunResult, RunReport]]


def require_matplotlib() -> None:
    """Raise ``PlotsUnavailable`` if matplotlib is missing. Call this before a long measurement, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsUnavailable("--plot needs matplotlib: pip install 'pdserve[bench]'")


def plot_runs(folder: Path, runs: Runs) -> list[Path]:
    """Write the three PNG plots of latency, throughput and TTFT against load into ``folder``; return their paths."""
    from . import chart

    with chart.style():
        load = folder / "ttft_load.png"
        return [
            _plot_latency(folder / "latency.png", _series(runs)),
            _plot_throughput(folder / "throughput.png", runs),
            _plot_sweep(load, [report for _, report in runs]) if len(runs) > 1 else _plot_in_flight(load, runs[0][0]),
        ]


def _series(runs: Runs) -> list[tuple[str, list[RequestRecord]]]:
    """Return the names and records of a plot's lines: one for each load of a sweep and each group of a scenario.

    Failed requests are left out.
    """
    series = []
    for result, report in runs:
        for group in report.groups:
            name = group.name if len(report.groups) > 1 else report.label
            series.append((name, [r for r in result.records if r.group == group.name and r.error is None]))
    return series


def _plot_latency(path: Path, series: list[tuple[str, list[RequestRecord]]]) -> Path:
    from . import chart

    figure, (ttft, itl) = chart.new_figure(2)
    for i, (name, records) in enumerate(series):
        chart.draw_cdf(ttft, (r.ttft * MS for r in records), name, i)
        chart.draw_cdf(itl, (gap * MS for r in records for gap in r.itls), name, i)
    chart.finish_cdf(ttft, "Time to first token")
    chart.finish_cdf(itl, "Inter-token latency")
    chart.legend_below(figure, ttft)
    return chart.save(figure, path)


def _plot_throughput(path: Path, runs: Runs) -> Path:
    """Plot two panels for each load: one above the other for a single load, side by side for several."""
    from . import chart

    is_sweep = len(runs) > 1
    columns, rows = (2, len(runs)) if is_sweep else (1, 2)
    figure, panels = chart.new_figure(columns, rows, width=5.4 if is_sweep else 8.2, height=1.8 if is_sweep else 2.5)
    for i, (result, report) in enumerate(runs):
        tokens, busy = panels[2 * i : 2 * i + 2]
        name = f": {report.label}" if is_sweep else ""
        for line, group in enumerate(report.groups):
            _draw_group(tokens, busy, [r for r in result.records if r.group == group.name], group.name, line)
        tokens.set(title=f"Output tokens a second{name}", ylim=(0, None), xlim=(0, None))
        busy.set(title=f"Requests under way{name}", ylim=(0, None), xlim=(0, None))
        chart.show_legend(tokens, len(report.groups))
    for panel in panels[-columns:]:
        panel.set_xlabel("seconds from the start")
    return chart.save(figure, path)


def _draw_group(tokens: Axes, busy: Axes, records: list[RequestRecord], name: str, line: int) -> None:
    from . import chart

    end = max((r.ended for r in records), default=0.0)
    times = [t for r in records for t in r.chunk_times]
    chart.draw_rate(tokens, times, [float(n) for r in records for n in r.chunk_tokens], end, name, line)
    chart.draw_level(busy, [(r.sent, 1) for r in records] + [(r.ended, -1) for r in records], end, name, line)


def _plot_sweep(path: Path, reports: list[RunReport]) -> Path:
    """Plot TTFT and throughput of each load. The x axis is the swept quantity; if both were swept, it is the rate.

    A run that sent all at once has no place on an axis of rates, and is left out there.
    """
    from . import chart

    by_rate = len({report.rate for report in reports}) > 1
    figure, (ttft, tokens) = chart.new_figure(2)
    others = list(dict.fromkeys(_other(report, by_rate) for report in reports))
    for i, other in enumerate(others):
        points = [
            (_offered(r, by_rate), r.total.ttft.median, r.total.ttft.p99, r.total.output_throughput)
            for r in reports
            if _other(r, by_rate) == other and r.total.ttft is not None and not (by_rate and r.rate is None)
        ]
        x, medians, tails, rates = zip(*sorted(points), strict=True) if points else ((), (), (), ())
        suffix = f", {other}" if len(others) > 1 else ""
        ttft.plot(x, medians, "o-", label=f"median{suffix}", color=chart.color(i))
        ttft.plot(x, tails, "s--", label=f"P99{suffix}", color=chart.color(i))
        tokens.plot(x, rates, "o-", label=other, color=chart.color(i))
    swept = "requests/s offered" if by_rate else "concurrency"
    ttft.set(title="Time to first token", xlabel=swept, ylabel="ms", xlim=(0, None))
    chart.log_y(ttft)
    tokens.set(title="Output tokens a second", xlabel=swept, ylim=(0, None), xlim=(0, None))
    ttft.legend()
    chart.show_legend(tokens, len(others))
    return chart.save(figure, path)


def _offered(report: RunReport, by_rate: bool) -> float:
    """Return the load's value on the x axis: its rate if ``by_rate``, else its limit of concurrency.

    A load without that value has its measured mean concurrency.
    """
    offered = report.rate if by_rate else report.concurrency
    return report.total.mean_concurrency if offered is None else offered


def _other(report: RunReport, by_rate: bool) -> str:
    """Return the quantity that is not on the x axis, with its value, such as "concurrency 8".

    ``by_rate``: whether the rate is on the x axis.
    """
    if by_rate:
        return f"concurrency {report.concurrency}" if report.concurrency else "no limit"
    return "all at once" if report.rate is None else f"{report.rate:g} req/s"


def _plot_in_flight(path: Path, result: RunResult) -> Path:
    """Plot each request's TTFT of one run against the number of others under way when it was sent."""
    from . import chart

    figure, (axes,) = chart.new_figure(width=6.4)
    groups = [group.name for group in result.workload.groups]
    ends = sorted(r.ended for r in result.records)
    by_start = sorted(result.records, key=lambda r: r.sent)
    others: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in groups}
    finished = 0
    for started, record in enumerate(by_start):
        while ends[finished] <= record.sent:
            finished += 1
        if record.error is None:
            others[record.group][0].append(started - finished)
            others[record.group][1].append(record.ttft * MS)
    for i, name in enumerate(groups):
        axes.scatter(*others[name], s=14, alpha=0.6, label=name, color=chart.color(i), linewidths=0)
    axes.set(title="Time to first token against load", xlabel="other requests under way when it was sent")
    axes.set(ylabel="TTFT, ms", ylim=(0, None))
    chart.whole_numbers(axes)
    chart.show_legend(axes, len(groups))
    return chart.save(figure, path)
