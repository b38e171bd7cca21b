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
    """Raise ``PlotsUnavailable`` when it is missing: before a long measurement, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsUnavailable("--plot needs matplotlib: pip install 'pdserve[bench]'")


def plot_runs(folder: Path, runs: Runs) -> list[Path]:
    """Write the plots into ``folder``; returns their paths."""
    series = _series(runs)
    paths = [_plot_latency(folder / "latency.png", series), _plot_throughput(folder / "throughput.png", runs)]
    if len(runs) > 1:
        paths.append(_plot_sweep(folder / "ttft_load.png", [report for _, report in runs]))
    else:
        paths.append(_plot_in_flight(folder / "ttft_load.png", runs[0][0]))
    return paths


def _series(runs: Runs) -> list[tuple[str, list[RequestRecord]]]:
    """What gets a line of its own: each load of a sweep, each group of a scenario; complete answers only."""
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
    chart.finish_cdf(ttft, "Time to first token", is_log=True)
    chart.finish_cdf(itl, "Inter-token latency", is_log=True)
    for axes in (ttft, itl):
        chart.show_legend(axes, len(series))
    return chart.save(figure, path)


def _plot_throughput(path: Path, runs: Runs) -> Path:
    from . import chart

    figure, (tokens, busy) = chart.new_figure(1, 2, width=8.2, height=2.5)
    lines = 0
    for result, report in runs:
        for group in report.groups:
            records = [r for r in result.records if r.group == group.name]
            name = group.name if len(report.groups) > 1 else report.label
            end = max((r.ended for r in records), default=0.0)
            times = [t for r in records for t in r.chunk_times]
            chart.draw_rate(tokens, times, [float(n) for r in records for n in r.chunk_tokens], end, name, lines)
            _draw_in_flight(busy, records, name, lines)
            lines += 1
    tokens.set(title="Output tokens a second", ylim=(0, None), xlim=(0, None))
    busy.set(title="Requests under way", xlabel="seconds from the start", ylim=(0, None), xlim=(0, None))
    chart.show_legend(tokens, lines)
    return chart.save(figure, path)


def _draw_in_flight(axes: Axes, records: list[RequestRecord], name: str, index: int) -> None:
    from . import chart

    changes = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    times, counts, now = [0.0], [0], 0
    for at, change in changes:
        now += change
        times.append(at)
        counts.append(now)
    axes.step(times, counts, where="post", label=name, color=chart.color(index), linewidth=1.2)


def _plot_sweep(path: Path, reports: list[RunReport]) -> Path:
    """TTFT and throughput of each load. The x axis is what was swept; where both were, it is the rate."""
    from . import chart

    by_rate = len({report.rate for report in reports}) > 1
    figure, (ttft, tokens) = chart.new_figure(2)
    others = list(dict.fromkeys(_other(report, by_rate) for report in reports))
    for i, other in enumerate(others):
        points = [
            (_offered(r, by_rate), r.total.ttft.median, r.total.ttft.p99, r.total.output_throughput)
            for r in reports
            if _other(r, by_rate) == other and r.total.ttft is not None
        ]
        x, medians, tails, rates = zip(*sorted(points), strict=True) if points else ((), (), (), ())
        suffix = f", {other}" if len(others) > 1 else ""
        ttft.plot(x, medians, "o-", label=f"median{suffix}", color=chart.color(i))
        ttft.plot(x, tails, "s--", label=f"P99{suffix}", color=chart.color(i))
        tokens.plot(x, rates, "o-", label=other, color=chart.color(i))
    swept = "requests/s offered" if by_rate else "concurrency"
    ttft.set(title="Time to first token", xlabel=swept, ylabel="ms", ylim=(0, None), xlim=(0, None))
    tokens.set(title="Output tokens a second", xlabel=swept, ylim=(0, None), xlim=(0, None))
    ttft.legend()
    chart.show_legend(tokens, len(others))
    return chart.save(figure, path)


def _offered(report: RunReport, by_rate: bool) -> float:
    """What is on the x axis. A run that sent all at once stands at the rate that the server managed."""
    if by_rate:
        return report.total.request_throughput if report.rate is None else report.rate
    return report.total.mean_concurrency if report.concurrency is None else report.concurrency


def _other(report: RunReport, by_rate: bool) -> str:
    """The name of what is not on the x axis."""
    if by_rate:
        return f"concurrency {report.concurrency}" if report.concurrency else "no limit"
    return "all at once" if report.rate is None else f"{report.rate:g} req/s"


def _plot_in_flight(path: Path, result: RunResult) -> Path:
    """Within a single run: each request's TTFT against how many others were under way when it was sent."""
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
