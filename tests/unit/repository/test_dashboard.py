"""Every query of the Grafana dashboard asks for series and labels that our pages have.

The files and addresses that Prometheus is configured to scrape exist.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from prometheus_client.samples import Sample
from support.fake_engine import FakeEngine, with_engine
from support.scrape import Page, scheduler_metrics

from pdserve.router.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.access_log import AccessCounts, AccessRecord
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server
from pdserve.server.http.metrics.metric_aliases import ALIASES

DOCKER = Path(__file__).parents[3] / "docker"
RECORDED = Path(__file__).with_name("recorded_metrics.txt")
"""Samples of all pages as they were before metrics were declared with their counts; each has its type."""
DASHBOARD = json.loads((DOCKER / "grafana" / "pdserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
METRIC = re.compile(r"\bpdserve_\w+")
GROUPING = re.compile(r"\b(?:by|on) ?\(([\w,]*)\)")
MATCHER = re.compile(r"[{,](\w+)=~?\"")
SCRAPERS = {"instance", "job", "leg"}
"""Labels that a scrape adds: its target's own, and those of /metrics/targets."""


def instance_page(mode: str, **options: str) -> Page:
    """Return the metrics page of an instance that has served a request."""

    async def run(engine: FakeEngine) -> Page:
        engine.client.dispatch([scheduler_metrics()])
        await engine.post("/generate", {"text": "a", "stream": True})
        return Page((await engine.get("/metrics")).text)

    return with_engine(run, disaggregation_mode=mode, **options)


def router_page() -> Page:
    """Return the metrics page of a router that has answered a request."""

    async def run() -> Page:
        access_counts = AccessCounts()
        access_counts.responses["POST", "/generate", 200] += 1
        fleet = Fleet(RouterOptions(prefill=["http://127.0.0.1:1"], decode=["http://127.0.0.1:2"]))
        metrics = RouterMetrics(fleet, access_counts)
        record = AccessRecord({"method": "POST", "path": "/generate", "headers": []})
        record.status = 200
        metrics.observe(record, 0.1)
        return Page(bytes((await metrics.page(None)).body).decode())  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each series that some page has."""
    pages = [instance_page("prefill"), instance_page("decode"), router_page()]
    return {name: page.labels(name) for page in pages for name in page.names()}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_finds_its_series_and_labels(query: str, labels: dict[str, set[str]]) -> None:
    names = METRIC.findall(query)
    assert names
    assert set(names) <= labels.keys()
    asked = {label for group in GROUPING.findall(query) for label in group.split(",")} | set(MATCHER.findall(query))
    assert asked <= set.union(*(labels[name] for name in names)) | SCRAPERS
    assert query.count("(") == query.count(")")


def test_the_dashboard_shows_both_legs_and_the_router() -> None:
    asked = {name for query in QUERIES for name in METRIC.findall(query)}
    assert len(asked) >= 35
    for part in ("pdserve_router_", "pdserve_prefill_leg_", "pdserve_handovers_", "pdserve_itl_budget_"):
        assert any(name.startswith(part) for name in asked)


def test_panels_have_places_of_their_own() -> None:
    def cells(panel: dict) -> Iterator[tuple[int, int]]:
        at = panel["gridPos"]
        for y in range(at["y"], at["y"] + at["h"]):
            yield from ((x, y) for x in range(at["x"], at["x"] + at["w"]))

    taken = [cell for panel in DASHBOARD["panels"] for cell in cells(panel)]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"} <= variables


def test_prometheus_scrapes_what_there_is() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    [router, instances] = jobs
    assert router["static_configs"] == [{"targets": [f"127.0.0.1:{RouterOptions().port}"]}]
    [discovery] = instances["http_sd_configs"]
    path = discovery["url"].removeprefix(f"http://127.0.0.1:{RouterOptions().port}")
    assert path_table(Server.ROUTER).find(path) is not None


def test_recorded_metrics_keep_their_types_names_and_labels() -> None:
    """Dashboards and alarms outside this repository ask for them."""
    pages = [instance_page("unified"), router_page()]
    pages += [instance_page("unified", metrics_aliases=vocabulary) for vocabulary in ("vllm", "sglang")]
    shown = {
        f"{family.type} {sample.name}{{{labels_of(sample)}}}"
        for page in pages
        for family in page.families
        for sample in family.samples
    }
    recorded = RECORDED.read_text(encoding="utf-8").replace("VERSION", version("pdserve"))
    assert set(recorded.splitlines()) - shown == set()


def labels_of(sample: Sample) -> str:
    """Write the labels in one order, without the buckets of histograms."""
    return ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "le")


def test_the_page_of_metrics_names_them_all_and_no_others() -> None:
    text = (DOCKER.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(METRIC.findall(text)) - {"pdserve_request"}
    pages = [instance_page("prefill"), instance_page("decode"), router_page()]
    families = [f for page in pages for f in page.families if not f.name.startswith("process_")]
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert shown - named == set()
    assert named - shown == set()


@pytest.mark.parametrize("vocabulary", ["vllm", "sglang"])
def test_the_page_of_metrics_names_every_alias(vocabulary: str) -> None:
    text = (DOCKER.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    counters = {f.name for f in instance_page("decode").families if f.type == "counter"}
    for alias in ALIASES[vocabulary]:  # type: ignore[index]
        name = alias.theirs.removeprefix(f"{vocabulary}:") + ("_total" if alias.ours in counters else "")
        assert f"`{name}`" in text
