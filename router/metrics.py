"""The router's ``/metrics``, and the list of instances to scrape.

The fleet, its instances and the access log count. This file gives the counts their names in Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import orjson
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from ..messages.metrics import Histogram
from ..runtime.web.access_log import AccessCounts, AccessRecord
from ..runtime.web.exposition import Families, MetricsPage
from .fleet import Fleet
from .instance import HealthState, Instance

SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
RETRIED = (502, 503)
"""Statuses with a counter from the start, even at 0."""


class RouterMetrics:
    """The router's metrics. The times of requests to ``generation_paths`` count."""

    def __init__(self, fleet: Fleet, visits: AccessCounts, generation_paths: Iterable[str]) -> None:
        self._fleet = fleet
        self._visits = visits
        self._page = MetricsPage(self._families)
        self._generation_paths = frozenset(generation_paths)
        self._first_token = Histogram(SECONDS)
        self._duration = Histogram(SECONDS)
        self._relayed_bytes = 0

    def visited(self, visit: AccessRecord, seconds: float) -> None:
        """Count a request that was answered after ``seconds``."""
        if visit.label not in self._generation_paths or visit.status != 200:
            return
        self._relayed_bytes += visit.sent_bytes
        self._duration.observe(seconds)
        if visit.streams and visit.first_byte_at:
            self._first_token.observe(visit.first_byte_at - visit.started)

    async def page(self, request: Request) -> Response:
        """GET /metrics."""
        return await self._page.answer()

    async def targets(self, request: Request) -> Response:
        """GET /metrics/targets: the instances, for Prometheus' ``http_sd_configs``."""
        told = [
            {"targets": [urlsplit(i.url).netloc], "labels": {"leg": i.role, "__scheme__": urlsplit(i.url).scheme}}
            for i in self._fleet.instances
        ]
        return Response(orjson.dumps(told), media_type="application/json")

    def _families(self) -> list[Metric]:
        families, visits = Families({}), self._visits
        families.counter(
            "pdserve_router_responses_total",
            "Answers of any kind; 499: the client left before there was one.",
            {(method, path, str(status)): count for (method, path, status), count in visits.responses.items()},
            "method",
            "path",
            "status",
        )
        families.gauge("pdserve_router_requests_in_flight", "Requests that are not answered yet.", visits.in_flight)
        families.histogram(
            "pdserve_router_time_to_first_token_seconds",
            "From a streamed request's arrival to the first byte of its answer's body.",
            self._first_token,
        )
        families.histogram(
            "pdserve_router_request_duration_seconds",
            "From a generation request's arrival to its answer's end.",
            self._duration,
        )
        families.counter("pdserve_router_relayed_bytes_total", "Of generated answers' bodies.", self._relayed_bytes)
        families.histogram(
            "pdserve_router_pick_duration_seconds",
            "Finding out who serves a request, waiting for them included.",
            self._fleet.pick_seconds,
        )
        families.counter(
            "pdserve_router_retries_total",
            "Attempts after a failed one, by the status that the client was spared.",
            {(str(status),): self._fleet.retries[status] for status in {*RETRIED, *self._fleet.retries}},
            "status",
        )
        add_instances(families, self._fleet.instances)
        return families.made


def add_instances(families: Families, instances: Iterable[Instance]) -> None:
    """Add the metrics of each instance, by ``url``: to Prometheus, the label ``instance`` is the router itself."""

    def each(value: Callable[[Instance], float]) -> dict[tuple[str, ...], float]:
        return {(i.url, i.role.value): value(i) for i in instances}

    labels = ("url", "leg")
    families.gauge(
        "pdserve_router_instance_healthy",
        "1 for an instance that is sent requests.",
        each(lambda i: i.state is HealthState.HEALTHY),
        *labels,
    )
    families.gauge("pdserve_router_instance_in_flight", "Requests under way.", each(lambda i: i.in_flight), *labels)
    families.gauge(
        "pdserve_router_instance_waiting_prompt_tokens",
        "Prompt tokens that it was sent and, as far as the router can tell, has not computed.",
        each(lambda i: i.prompt_tokens),
        *labels,
    )
    families.gauge(
        "pdserve_router_instance_resting_seconds",
        "For how long its circuit breaker is open: it asked to be left alone, or failed several requests in a row.",
        each(lambda i: i.breaker.seconds_left),
        *labels,
    )
    families.counter(
        "pdserve_router_instance_requests_total", "Requests that it was sent.", each(lambda i: i.requests), *labels
    )
    families.counter(
        "pdserve_router_instance_failures_total",
        "Requests that found it gone.",
        each(lambda i: i.failures),
        *labels,
    )
