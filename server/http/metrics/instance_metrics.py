"""An instance's ``/metrics``: the counts of its scheduler and its HTTP process.

Each count is declared in the file that makes it; docs/metrics.md lists them beside vLLM's and SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from ....runtime.metrics import Metrics, counter, gauge, read
from ....runtime.web.access_log import AccessCounts
from ....runtime.web.prometheus import exposed
from ...options import ServerOptions
from ..engine import request_metrics
from ..engine.engine_client import EngineClient
from .metric_aliases import ALIASES, HIT_RATE, THROUGHPUT, Alias, Growth, aliased

INFO_LABELS = ("model", "version", "epoch")


class InstanceMetrics:
    """Makes the metric families of each scrape. Every sample of pdserve's own has the instance's ``role``."""

    def __init__(
        self, options: ServerOptions, engine: EngineClient, access_counts: AccessCounts, info: Mapping[str, str]
    ) -> None:
        self._options = options
        self.engine = engine
        self.access_counts = access_counts
        self.info = info
        self._aliases: tuple[Alias, ...] = ALIASES[options.metrics_aliases]
        self._throughput = Growth(base=time.monotonic(), least=1.0)
        self._hit_rate = Growth(base=0.0, least=1.0)

    def families(self) -> Iterable[Metric]:
        """Return the families of one scrape: this process's, those of the scheduler's last report, and aliases.

        Aliases are for the dashboards of other servers, if the options ask for them.
        """
        scheduler = self.engine.scheduler_metrics
        families = [*read(METRICS, self), *read(request_metrics.METRICS, self.engine.metrics)]
        families += scheduler.families if scheduler is not None else []
        own = exposed(families, {"role": self.engine.role})
        if not self._aliases:
            return own
        labels = {"model_name": self._options.model_name}
        return [*own, *aliased([*own, *exposed(read(BETWEEN_SCRAPES, self), {})], self._aliases, labels)]

    def throughput(self) -> float:
        """Return the output tokens a second since the last call, which is the last scrape.

        A call less than a second later returns the same value.
        """
        return self._throughput.ratio(self.engine.metrics.generation_tokens, time.monotonic())

    def hit_rate(self) -> float | None:
        """Return the share (0 to 1) of prompt tokens that were cached since the last call, which is the last scrape.

        Return None before the scheduler's first report.
        """
        if self.engine.scheduler_metrics is None:
            return None
        counts = {family.info.name: family.values for family in self.engine.scheduler_metrics.families}
        hits, asked = counts["pdserve_prefix_cache_hit_tokens_total"], counts["pdserve_prefix_cache_asked_tokens_total"]
        assert isinstance(hits, float | int)
        assert isinstance(asked, float | int)
        return self._hit_rate.ratio(hits, asked)


METRICS: Metrics[InstanceMetrics] = (
    gauge(
        "pdserve_instance_info",
        "Always 1; says which instance this is.",
        lambda m: {tuple(m.info[label] for label in INFO_LABELS): 1},
        *INFO_LABELS,
    ),
    counter(
        "pdserve_http_responses_total",
        "Answers of any kind; 499: the client left before there was one.",
        lambda m: m.access_counts.by_labels(),
        "method",
        "path",
        "status",
        note="Paths that don't exist are `other`.",
    ),
    gauge(
        "pdserve_http_requests_in_flight",
        "HTTP requests that are not answered yet.",
        lambda m: m.access_counts.in_flight,
    ),
    gauge("pdserve_live_requests", "Requests that the engine has not ended.", lambda m: len(m.engine.live)),
)
BETWEEN_SCRAPES: Metrics[InstanceMetrics] = (
    gauge(THROUGHPUT, "Output tokens a second since the last scrape.", lambda m: m.throughput()),
    gauge(HIT_RATE, "Share of prompt tokens that were cached since the last scrape.", lambda m: m.hit_rate()),
)
"""Gauges that only aliases show: from our counters, Prometheus computes better ones."""
