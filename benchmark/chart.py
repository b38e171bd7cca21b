"""How every plot looks. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
DPI = 140
SHORTEST_MS = 0.01
"""Where times are cut off below: chunks that came in one read are 0 apart, which a logarithmic axis doesn't have."""
# Typed loosely: matplotlib's own type of such a mapping names every setting, and differs between its versions.
STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
}


def color(index: int) -> str:
    """The ``index``-th line's colour."""
    return COLORS[index % len(COLORS)]


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 5.4, height: float = 3.5
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. ``width``, ``height``: inches of each."""
    # Figures of their own, not pyplot's: nothing is kept in a global list.
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write the PNG; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=DPI)
    return path


def draw_cdf(axes: Axes, samples: Iterable[float], label: str, index: int) -> None:
    """The share of ``samples`` (ms) that is at most x."""
    values = np.maximum(np.sort(np.fromiter(samples, np.float64)), SHORTEST_MS)
    if not values.size:
        return
    share = np.arange(1, values.size + 1) / values.size
    axes.step([values[0], *values], [0.0, *share], where="post", label=label, color=color(index))


def finish_cdf(axes: Axes, title: str, *, is_log: bool) -> None:
    """Titles, scales and the lines that readers look for."""
    axes.set(title=title, xlabel="ms", ylabel="share of samples", ylim=(0, 1.02))
    if is_log:
        axes.set_xscale("log")
        plain_log_ticks(axes)
    else:
        axes.set_xlim(left=0)
    for level, name in ((0.5, "P50"), (0.99, "P99")):
        axes.axhline(level, color="#9a9a9a", linewidth=0.8, linestyle=":")
        axes.annotate(
            name, (1, level), (-2, 2), ("axes fraction", "data"), "offset points", ha="right", color="#777", fontsize=8
        )


def plain_log_ticks(axes: Axes) -> None:
    """10, 100, 1,000 instead of powers of ten; within a decade 2 and 5 as well."""
    low, high = axes.get_xlim()
    ticks = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    step = [tick for tick in ticks if len(ticks) <= 9 or f"{tick:e}"[0] == "1"]
    axes.set_xticks(step)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def draw_rate(axes: Axes, times: Sequence[float], weights: Sequence[float], end: float, label: str, index: int) -> None:
    """Events a second over time, in bins of a second (less when the run is short)."""
    bins = max(1, min(int(np.ceil(end)), 400)) if end > 8 else 20
    counts, edges = np.histogram(times, bins=bins, range=(0, max(end, 1e-9)), weights=weights)
    axes.stairs(counts / np.diff(edges), edges, label=label, color=color(index), linewidth=1.4)


def whole_numbers(axes: Axes) -> None:
    """Only whole numbers on the x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def show_legend(axes: Axes, entries: int) -> None:
    """A legend, where there is more than one thing to tell apart."""
    if entries > 1:
        axes.legend()
