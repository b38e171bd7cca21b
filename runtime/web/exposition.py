"""``GET /metrics``: from plain counts to Prometheus' text, with its own client library.

The counts stay what they are where they are made, numbers and ``Histogram``s; families are made of them at each scrape.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from ...messages.metrics import Histogram

Values = float | Mapping[tuple[str, ...], float]
"""One value, or one for each combination of label values."""


class Families:
    """The families of one scrape in the making; ``labels`` go with each of their samples."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names = tuple(labels)
        self._values = tuple(labels.values())
        self.made: list[Metric] = []

    def gauge(self, name: str, meaning: str, values: Values, *by: str) -> None:
        """Add a gauge; ``by`` are the names of the labels in ``values``."""
        self._add(GaugeMetricFamily(name, meaning, labels=(*self._names, *by)), values)

    def counter(self, name: str, meaning: str, values: Values, *by: str) -> None:
        """Add a counter; ``name`` ends in ``_total``."""
        self._add(CounterMetricFamily(name, meaning, labels=(*self._names, *by)), values)

    def histogram(self, name: str, meaning: str, counts: Histogram) -> None:
        """Add a histogram; ``name`` ends in the unit."""
        family = HistogramMetricFamily(name, meaning, labels=self._names)
        family.add_metric(self._values, list(_cumulative(counts)), counts.total)
        self.made.append(family)

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
        for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric((*self._values, *labels), value)
        self.made.append(family)


class MetricsPage:
    """The page, made anew by ``families`` at each scrape; beside it stand the figures of this process, from /proc."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families
        self._process = ProcessCollector(registry=None)

    async def answer(self) -> Response:
        """Return the page in Prometheus' text format, which all scrapers take.

        OpenMetrics is never used, even on request: the library would replace the colons in other servers' names by
        underscores.
        """
        text = b""
        for family in [*self._families(), *self._process.collect()]:
            text += generate_latest(_Family(family))
            # The whole page takes milliseconds, and no stream has to wait for it.
            await asyncio.sleep(0)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class _Family(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _cumulative(counts: Histogram) -> Iterator[tuple[str, float]]:
    below = 0
    for bound, count in zip((*counts.bounds, math.inf), counts.counts, strict=True):
        below += count
        yield ("+Inf" if math.isinf(bound) else str(float(bound))), below
