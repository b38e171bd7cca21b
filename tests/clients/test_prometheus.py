"""A real Prometheus scrapes a pair as docker/prometheus.yml says, and knows what the dashboard asks for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.machine import limit
from support.processes import Pair, free_ports, wait_until

HERE = Path(__file__).parent
DOCKER = HERE.parents[1] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "pdserve.json").read_text())
QUERIES = sorted(
    {target["expr"] for panel in DASHBOARD["panels"] if panel["type"] != "row" for target in panel["targets"]}
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prometheus(running_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    program = shutil.which("prometheus")
    assert program, "there is no prometheus: apt-get install prometheus"
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = (DOCKER / "prometheus.yml").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{running_pair.router.port}")
    parsed = yaml.safe_load(config)
    parsed["global"]["scrape_interval"] = "1s"
    for job in parsed["scrape_configs"]:
        for found in job.get("http_sd_configs", ()):
            found["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(parsed))
    [port] = free_ports(1)
    own = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [program, *own, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=limit(30), trust_env=False) as client:
            wait_until(lambda: ready(client), 30, "Prometheus is ready", every=0.2)
            yield client
    finally:
        process.terminate()
        process.wait(limit(30))


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> list[dict]:
    answer = client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    return answer.json()["data"]["result"]


def test_targets_are_found_and_up(prometheus: httpx.Client) -> None:
    def all_up() -> bool:
        active = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
        return len(active) == 3 and {target["health"] for target in active} == {"up"}

    wait_until(all_up, 30, "router, prefill and decode are scraped", every=0.5)


def test_every_query_of_the_dashboard_has_series(pair: Pair, prometheus: httpx.Client) -> None:
    body = {"text": "Hello there", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}, "stream": True}
    silent = set(QUERIES)

    def asked() -> bool:
        assert pair.router.post("/generate", body).status_code == 200
        for expression in sorted(silent):
            # Grafana fills these in.
            filled = re.sub(r"\$__rate_interval|\$__range", "20s", expression)
            if query(prometheus, re.sub(r"\$\{?\w+(:\w+)?\}?", ".*", filled)):
                silent.discard(expression)
        return not silent

    try:
        wait_until(asked, 60, "series for every query", every=1.0)
    except AssertionError:
        raise AssertionError(f"no series for: {sorted(silent)}") from None


def test_tokens_add_up(pair: Pair, prometheus: httpx.Client) -> None:
    """Prometheus counts what clients are given, and a pair counts once. (Of what others left, more was generated.)"""

    def counted() -> int:
        [total] = query(prometheus, "sum(pdserve_generation_tokens_total)")
        return int(float(total["value"][1]))

    def given() -> int:
        pages = [httpx.get(server.url + "/metrics", trust_env=False).text for server in (pair.prefill, pair.decode)]
        found = [re.search(r"^pdserve_generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE) for page in pages]
        return sum(int(float(match[1])) for match in found if match)

    wait_until(lambda: counted() == given(), 20, "the last scrape is of now", every=0.5)
    before, generated = counted(), pair.decode.info()["counters"]["generation_tokens"]
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    assert pair.router.post("/generate", body).status_code == 200
    wait_until(lambda: counted() == before + 20, 20, "20 tokens are counted, once", every=0.5)
    assert pair.decode.info()["counters"]["generation_tokens"] == generated + 20
