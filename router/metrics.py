"""The router's ``/metrics``: counts of its fleet, of its instances and of its HTTP front; and its scrape targets."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import orjson
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from ..messages.metrics import Histogram, Labelled
from ..runtime.metrics import Metrics, counter, gauge, histogram, read
from ..runtime.web.access_log import AccessCounts, AccessRecord
from ..runtime.web.paths import AtRouter
from ..runtime.web.prometheus import MetricsPage, exposed
from .fleet import Fleet
from .instance import HealthState, Instance
from .membership import MemberState

SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
PRESENT = tuple(state for state in MemberState if state is not MemberState.GONE)
"""States of the instances that a router has."""
RETRIED = (502, 503)
"""Statuses with a counter from the start, even at 0."""


class RouterMetrics:
    """The router's metrics. Only times of requests that a model computes count."""

    def __init__(self, fleet: Fleet, access_counts: AccessCounts) -> None:
        self.fleet = fleet
        self.access_counts = access_counts
        self._page = MetricsPage(self._families)
        self.first_token = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.relayed_bytes = 0

    def observe(self, record: AccessRecord, seconds: float) -> None:
        """Count times and bytes of a request that a model computed. It was answered after ``seconds``."""
        computes = record.facts.at_router in (AtRouter.GENERATE, AtRouter.READ_PROMPT)
        if not computes or record.status != 200:
            return
        self.relayed_bytes += record.sent_bytes
        self.duration.observe(seconds)
        if record.streams and record.first_byte_at:
            self.first_token.observe(record.first_byte_at - record.started)

    async def page(self, request: Request) -> Response:
        """GET /metrics: the router's metrics in Prometheus' text format."""
        return await self._page.answer()

    async def targets(self, request: Request) -> Response:
        """GET /metrics/targets: the instances, for Prometheus' ``http_sd_configs``."""
        samples = [
            {"targets": [urlsplit(i.url).netloc], "labels": {"leg": i.role, "__scheme__": urlsplit(i.url).scheme}}
            for i in self.fleet.instances
        ]
        return Response(orjson.dumps(samples), media_type="application/json")

    def _families(self) -> list[Metric]:
        return exposed(read(METRICS, self), {})


def _each(value: Callable[[Instance], float]) -> Callable[[RouterMetrics], Labelled]:
    """Make a function that reads ``value`` of each instance, labelled by the instance's URL and role."""
    return lambda metrics: {(i.url, i.role.value): value(i) for i in metrics.fleet.instances}


def _retries(metrics: RouterMetrics) -> Labelled:
    retries = metrics.fleet.retries
    return {str(status): retries[status] for status in {*RETRIED, *retries}}


LABELS = ("url", "leg")
"""Labels of each instance's metrics: to Prometheus, the label ``instance`` is the router itself."""
METRICS: Metrics[RouterMetrics] = (
    counter(
        "pdserve_router_responses_total",
        "Answers of any kind, by the status they began with: 200 for a stream that ends with an error event. 499: the "
        "client left before there was one.",
        lambda m: m.access_counts.by_labels(),
        "method",
        "path",
        "status",
    ),
    gauge(
        "pdserve_router_requests_in_flight", "Requests that are not answered yet.", lambda m: m.access_counts.in_flight
    ),
    histogram(
        "pdserve_router_time_to_first_token_seconds",
        "From a streamed request's arrival to the first byte of its answer's body.",
        lambda m: m.first_token,
    ),
    histogram(
        "pdserve_router_request_duration_seconds",
        "From a generation request's arrival to its answer's end.",
        lambda m: m.duration,
        note="Only of answers with status 200.",
    ),
    counter("pdserve_router_relayed_bytes_total", "Bytes of generated answers' bodies.", lambda m: m.relayed_bytes),
    histogram(
        "pdserve_router_pick_duration_seconds",
        "Time to find instances that serve a request, waiting for them included.",
        lambda m: m.fleet.pick_seconds,
    ),
    counter(
        "pdserve_router_retries_total",
        "Attempts after a failed one, by the status that the client was spared.",
        _retries,
        "status",
    ),
    gauge(
        "pdserve_router_instances",
        "Instances by their membership.",
        lambda m: {state.value: sum(i.member_state is state for i in m.fleet.instances) for state in PRESENT},
        "state",
        note="Only those in state ready are sent requests, while they are healthy.",
    ),
    gauge(
        "pdserve_router_instance_healthy",
        "1 for an instance that passes its health checks.",
        _each(lambda i: i.state is HealthState.HEALTHY),
        *LABELS,
    ),
    gauge(
        "pdserve_router_instance_in_flight", "Requests under way at an instance.", _each(lambda i: i.under_way), *LABELS
    ),
    gauge(
        "pdserve_router_instance_waiting_prompt_tokens",
        "Prompt tokens that an instance has to compute, as far as the router can tell. 0 at the decode of a pair.",
        _each(lambda i: i.prompt_tokens),
        *LABELS,
    ),
    gauge(
        "pdserve_router_instance_resting_seconds",
        "Seconds until an instance's circuit breaker closes: it asked to be left alone, or failed several "
        "requests in a row.",
        _each(lambda i: i.breaker.seconds_left),
        *LABELS,
        note="It asks by 503 with `Retry-After`. At most half of a role is left out at a time.",
    ),
    counter(
        "pdserve_router_instance_requests_total",
        "Requests that an instance was sent.",
        _each(lambda i: i.requests),
        *LABELS,
    ),
    counter(
        "pdserve_router_instance_failures_total",
        "Requests that found an instance gone.",
        _each(lambda i: i.failures),
        *LABELS,
    ),
)
