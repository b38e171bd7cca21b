"""How every plot looks. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# A file matplotlibrc in the current directory may have changed the settings.
mpl.rcdefaults()

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
    "lines.linewidth": 1.7,
    "savefig.dpi": DPI,
}
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.10g}")


@contextmanager
def style() -> Iterator[None]:
    """Use the style of pdserve's plots for everything that is drawn in the block."""
    with mpl.rc_context(STYLE):
        yield


def color(index: int) -> str:
    """Return the colour of the line number ``index``, from 0; colours repeat after the last one."""
    return COLORS[index % len(COLORS)]


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 5.4, height: float = 3.5
) -> tuple[Figure, list[Axes]]:
    """Make a figure and its axes, row by row. ``width`` and ``height`` are the inches of each."""
    # Figures of their own, not pyplot's: nothing is kept in a global list.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for one in axes:
        one.yaxis.set_major_formatter(_THOUSANDS)
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` to ``path``, in the format of its suffix, and return ``path``.

    Makes the folder if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_cdf(axes: Axes, samples: Iterable[float], label: str, index: int) -> None:
    """Draw the share of ``samples`` (ms) that is at most x, as line ``index``.

    P90, P99 and P99.9 are equally far apart.
    """
    values = np.maximum(np.sort(np.fromiter(samples, np.float64)), SHORTEST_MS)
    if not values.size:
        return
    # The last sample is drawn as half a sample short of everything: "all of them" is infinitely many nines.
    above = np.maximum(values.size - np.arange(1, values.size + 1), 0.5) / values.size
    axes.step([values[0], *values], [0.0, *-np.log10(above)], where="post", label=label, color=color(index))


def finish_cdf(axes: Axes, title: str) -> None:
    """Set the title and the scales of a plot of ``draw_cdf``. Call this after all lines are drawn."""
    shares = (0.5, 0.9, 0.99, 0.999, 0.9999)
    heights = [-np.log10(1 - share) for share in shares]
    shown = [i for i, height in enumerate(heights) if height <= max(axes.dataLim.y1, 1.0)]
    axes.set_yticks([heights[i] for i in shown], [f"P{shares[i] * 100:g}" for i in shown])
    axes.set(title=title, xlabel="ms", ylabel="percentile", ylim=(0, None), xscale="log")
    _plain_log_ticks(axes)


def _plain_log_ticks(axes: Axes) -> None:
    """Label the logarithmic x axis with 10, 100, 1,000 instead of powers of ten.

    It gets 2 and 5 of each as well, if these are at most six labels. Call this after drawing: the axis limits count.
    """
    low, high = axes.get_xlim()
    ticks = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    axes.set_xticks([tick for tick in ticks if len(ticks) <= 6 or f"{tick:e}"[0] == "1"])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(_THOUSANDS)


def draw_rate(axes: Axes, times: Sequence[float], weights: Sequence[float], end: float, label: str, index: int) -> None:
    """Draw events per second over time, as line ``index``, in bins of about a second (less for a short run).

    ``times``: seconds of the events. ``weights``: what each counts for. ``end``: end of the time axis in seconds.
    """
    bins = int(np.clip(np.ceil(end), 20, 300))
    counts, edges = np.histogram(times, bins=bins, range=(0, max(end, 1e-9)), weights=weights)
    axes.stairs(counts / np.diff(edges), edges, label=label, color=color(index), linewidth=1.4)


def draw_level(axes: Axes, changes: Iterable[tuple[float, int]], end: float, label: str, index: int) -> None:
    """Draw the running sum of ``changes`` (seconds, difference) up to ``end``, as line ``index``.

    Levels that last too short to be seen are left out.
    """
    blink = max(end, 1e-9) / 1000
    levels, now = {0: 0}, 0
    for at, change in sorted(changes):
        now += change
        levels[int(at / blink)] = now
    times = [step * blink for step in levels]
    axes.step(times, list(levels.values()), where="post", label=label, color=color(index), linewidth=1.2)


def log_x(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers as labels. Call this after everything is drawn."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.1, high * 1.1)
    _plain_log_ticks(axes)


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers as labels."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.yaxis.set_minor_formatter(lambda *_: "")


def whole_numbers(axes: Axes) -> None:
    """Label the x axis with whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def show_legend(axes: Axes, entries: int) -> None:
    """Show a legend if ``entries``, the number of lines, is more than one."""
    if entries > 1:
        axes.legend()


def legend_below(figure: Figure, axes: Axes) -> None:
    """Show one legend below all panels of ``figure``, for the lines of ``axes``, if there is more than one."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
