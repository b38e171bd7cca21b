"""The page's plots. Importing this needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.benchmark import chart

from .cases import CASES, MIXED
from .engines import ENGINES
from .page import PAIRS, SPLIT_ENGINES
from .results import Results

SHOWN_SECONDS = 60
"""The mixed load lasts 40; what an engine has left by then trickles on for minutes."""


def draw_charts(folder: Path, results: Results) -> list[Path]:
    """Draw the plots that there are results for into PNG files in ``folder``. Return the files' paths."""
    with chart.style():
        drawn = [_draw_ratios(folder / "ratios.png", results), _draw_mixed(folder, results)]
    return [path for paths in drawn for path in paths]


def _draw_ratios(path: Path, results: Results) -> list[Path]:
    """Draw how many times better pdserve is, as bars for each case's two main figures and each pair of engines.

    Return the file's path in a list, which is empty without results.
    """
    figures = [(case, metric) for case in CASES.values() if case is not MIXED for metric in case.metrics[:2]]
    figures = [f for f in figures if any(results.ratio(f[0], *pair, f[1]) for pair in PAIRS)]
    if not figures:
        return []
    figure, (axes,) = chart.new_figure(width=8.2, height=1.2 + 0.34 * len(figures))
    thickness = 0.8 / len(PAIRS)
    for i, (ours, theirs) in enumerate(PAIRS):
        bars = [(row, results.ratio(case, ours, theirs, metric)) for row, (case, metric) in enumerate(figures)]
        known = [(row + i * thickness, ratio) for row, ratio in bars if ratio is not None]
        label = f"{ENGINES[ours].title} to {ENGINES[theirs].title}"
        # From 1, which is "equal": to the right where it is better, to the left where it is worse.
        rows, lengths = [y for y, _ in known], [ratio - 1 for _, ratio in known]
        axes.barh(rows, lengths, thickness * 0.92, left=1, label=label, color=chart.color(i))
        for y, ratio in known:
            away, side = (3, "left") if ratio >= 1 else (-3, "right")
            text = f"{ratio:.2f}"
            axes.annotate(text, (ratio, y), (away, 0), textcoords="offset points", va="center", ha=side, fontsize=8)
    names = [f"{case.name}: {metric.title.removesuffix(', ms')}" for case, metric in figures]
    axes.set_yticks([row + thickness / 2 for row in range(len(figures))], names)
    axes.axvline(1, color="#444", linewidth=1)
    axes.set(title="How many times better pdserve is (1: equal)", ylim=(len(figures) - 0.3, -0.6))
    axes.grid(visible=False, axis="y")
    chart.log_x(axes)
    chart.legend_below(figure, axes)
    return [chart.save(figure, path)]


def _draw_mixed(folder: Path, results: Results) -> list[Path]:
    """Draw latencies and throughput of the engines under the mixed load, of the round nearest to the median.

    Return the files' paths; none without results.
    """
    runs = {name: run for name in SPLIT_ENGINES if (run := results.typical_round(MIXED, name)) is not None}
    if not runs:
        return []
    figure, (itl, short, long) = chart.new_figure(3, width=4.3)
    over_time, (tokens,) = chart.new_figure(width=8.2, height=2.8)
    for i, (name, run) in enumerate(runs.items()):
        title = ENGINES[name].title
        chart.draw_cdf(itl, _gaps(run, "short"), title, i)
        for axes, group in ((short, "short"), (long, "long")):
            chart.draw_cdf(axes, [r["ttft"] for r in _requests(run, group)], title, i)
        arrived = [(t, n) for r in run["requests"] for t, n in zip(r["chunk_times"], r["chunk_tokens"], strict=True)]
        times, counts = zip(*arrived, strict=True)
        chart.draw_rate(tokens, times, counts, max(times), title, i)
    chart.finish_cdf(itl, "Inter-token latency of the streams")
    chart.finish_cdf(short, "TTFT of the streams")
    chart.finish_cdf(long, "TTFT of the long prompts")
    chart.legend_below(figure, itl)
    tokens.set(
        title="Output tokens a second under the mixed load", xlabel="seconds", ylim=(0, None), xlim=(0, SHOWN_SECONDS)
    )
    chart.legend_below(over_time, tokens)
    return [chart.save(figure, folder / "mixed_latency.png"), chart.save(over_time, folder / "mixed_throughput.png")]


def _requests(run: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    return [request for request in run["requests"] if request["group"] == group and request["error"] is None]


def _gaps(run: Mapping[str, Any], group: str) -> list[float]:
    """Return the inter-token latencies of a group of requests, in milliseconds."""
    times = [request["chunk_times"] for request in _requests(run, group)]
    return [(b - a) * 1e3 for chunks in times for a, b in itertools.pairwise(chunks)]
