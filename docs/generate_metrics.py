"""Writes the tables of ``docs/metrics.md`` from the metrics' declarations. ``make docs`` runs it.

A test compares the page with the code.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

from pdserve.messages.metrics import MetricKind
from pdserve.runtime.metrics import Metric

PAGE = Path(__file__).with_name("metrics.md")
ROOMS = ("scheduler", "disaggregation.handover", "server.http", "router")
"""Packages of the modules with tables named ``METRICS``."""
BEGIN, END = "<!-- Written by `make docs` from the tables METRICS in the code: edit those. -->", "<!-- End. -->"
BETWEEN = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def render() -> str:
    """Return the page with its two tables, the instance's and the router's, as the code has them."""
    metrics = declared()
    of_router = [m for m in metrics if m.info.name.startswith("pdserve_router_")]
    tables = iter((table([m for m in metrics if m not in of_router]), table(of_router)))
    return BETWEEN.sub(lambda _: f"{BEGIN}\n\n{next(tables)}\n\n{END}", PAGE.read_text(encoding="utf-8"))


def declared() -> list[Metric[Any]]:
    """Return every declared metric, by name."""
    found: dict[str, Metric[Any]] = {}
    for room in ROOMS:
        package = importlib.import_module(f"pdserve.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for metric in getattr(importlib.import_module(module.name), "METRICS", ()):
                if metric.info.name in found:
                    raise ValueError(f"{metric.info.name} is declared twice, the second time in {module.name}")
                found[metric.info.name] = metric
    return [found[name] for name in sorted(found)]


def table(metrics: list[Metric[Any]]) -> str:
    """Return a row for each of ``metrics``."""
    rows = [("name", "labels", "meaning"), ("---",) * 3, *map(row, metrics)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(metric: Metric[Any]) -> tuple[str, str, str]:
    """Return the cells of one metric; histograms are marked."""
    info = metric.info
    mark = " H" if info.kind is MetricKind.HISTOGRAM else ""
    labels = ", ".join(f"`{label}`" for label in info.labels)
    return f"`{info.name}`{mark}", labels, f"{info.help} {metric.note}".strip()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
