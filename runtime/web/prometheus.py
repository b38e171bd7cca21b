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

from ...messages.metrics import Family, Histogram, MetricInfo, MetricKind, Values


def exposed(families: Iterable[Family], labels: Mapping[str, str]) -> list[Metric]:
    """Convert ``families`` to the metrics of Prometheus' client library; ``labels`` are added to every sample."""
    return [_metric(family.info, family.values, labels) for family in families]


def _metric(info: MetricInfo, values: Values, labels: Mapping[str, str]) -> Metric:
    names, common = (*labels, *info.labels), tuple(labels.values())
    if isinstance(values, Histogram):
        metric = HistogramMetricFamily(info.name, info.help, labels=names)
        metric.add_metric(common, list(_cumulative(values)), values.total)
        return metric
    made = CounterMetricFamily if info.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = made(info.name, info.help, labels=names)
    for by, value in (values if isinstance(values, dict) else {(): values}).items():
        family.add_metric((*common, *(by if isinstance(by, tuple) else (by,))), value)
    return family


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
