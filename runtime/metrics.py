"""How a metric is declared: once, in the file of the count that it shows.

A file that owns counts ends in a table of their metrics, one entry each::

    METRICS: Metrics[Planner] = (
        counter("pdserve_retractions_total", "Running requests that lost their memory.", lambda p: p.retractions),
    )

``read(METRICS, planner)`` gives the values as they are now. ``GET /metrics`` shows what was read, whichever process
read it, and ``make docs`` writes all tables into docs/metrics.md. So nothing else names the metric.
Only a new table needs one more line: ``read`` where the other metrics of its process are read.

A name follows Prometheus' conventions: it ends in its unit (``_seconds``, ``_bytes``, ``_tokens``, ``_ratio``), and a
counter's in ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from ..messages.metrics import Family, Histogram, Labelled, MetricInfo, MetricKind, Values

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Metric(Generic[Owner]):
    """Declaration of one metric of an ``Owner``."""

    info: MetricInfo
    read: Callable[[Owner], Values | None]
    """Takes the values from the owner. None: the owner has no value now, and the metric is not shown."""
    note: str = ""
    """Markdown that docs/metrics.md adds to the help text: meanings of label values, links."""


Metrics: TypeAlias = tuple[Metric[Owner], ...]


def counter(
    name: str, help: str, read: Callable[[Owner], Values | None], *labels: str, note: str = ""
) -> Metric[Owner]:
    """Declare a counter, a metric that never falls. ``name`` ends in ``_total``.

    ``read`` takes its value from the owner, or a mapping from values of ``labels`` to values. None: it is not shown.
    """
    return Metric(MetricInfo(MetricKind.COUNTER, name, help, labels), read, note)


def gauge(name: str, help: str, read: Callable[[Owner], Values | None], *labels: str, note: str = "") -> Metric[Owner]:
    """Declare a gauge, a metric that rises and falls.

    ``read`` takes its value from the owner, or a mapping from values of ``labels`` to values. None: it is not shown.
    """
    return Metric(MetricInfo(MetricKind.GAUGE, name, help, labels), read, note)


def histogram(name: str, help: str, read: Callable[[Owner], Histogram], *, note: str = "") -> Metric[Owner]:
    """Declare a histogram, values counted by size. ``name`` ends in their unit.

    ``read`` takes it from the owner, and a copy of it is shown.
    """
    return Metric(MetricInfo(MetricKind.HISTOGRAM, name, help), lambda owner: read(owner).copy(), note)


def read(table: Metrics[Owner], owner: Owner | None) -> list[Family]:
    """Read every metric of ``table`` from ``owner``, without those that have no value now.

    If ``owner`` is None, return [].
    """
    if owner is None:
        return []
    values = ((metric.info, metric.read(owner)) for metric in table)
    return [Family(info, value) for info, value in values if value is not None]


def one_of(value: str, states: Iterable[str]) -> Labelled:
    """Return a gauge's values by state: 1 for the present state ``value``, and 0 for the other ``states``."""
    return {state: int(state == value) for state in states}
