"""After one client's 429s, and after a request that crashes instances, good requests go to all instances that live.

Four real instances stand behind a real router. ``tests/unit/router/test_circuit_breaker.py`` and
``test_router_crashes.py`` check the rules with scripted ones.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, freeze, launched, wait_until
from support.scrape import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COUNT, GOOD_REQUESTS = 4, 40
QUEUE = 1
"""Requests that may wait at an instance, where one may run."""
LIMITS = ("--max-running-requests", "1", "--max-queued-requests", str(QUEUE))
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
POISON = {"input_ids": [8, 9, 10], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}


@dataclass
class Cluster:
    """Unified instances and the router before them."""

    instances: list[Launched]
    router: Launched

    def served(self) -> list[float]:
        """Return how many requests each instance has finished."""
        pages = (Page(i.client.get(i.url + "/metrics").raise_for_status().text) for i in self.instances)
        return [page.total("pdserve_requests_finished_total", reason="length") for page in pages]

    def serves_good_requests_everywhere(self) -> None:
        """Send good requests. Assert that all are answered, and that each instance answers a part of them.

        On a busy machine the parts need not be equal.
        """
        before = self.served()
        statuses = [self.router.post("/generate", BODY).status_code for _ in range(GOOD_REQUESTS)]
        assert statuses == [200] * GOOD_REQUESTS
        share = GOOD_REQUESTS / len(self.instances)
        parts = [now - then for now, then in zip(self.served(), before, strict=True)]
        assert sum(parts) == GOOD_REQUESTS
        assert min(parts) >= share / 2


@pytest.fixture
def cluster(tmp_path, tiny_args) -> Iterator[Cluster]:
    """Four instances that are full with two requests each."""
    with ExitStack() as stack:
        names = [f"unified-{i}" for i in range(COUNT)]
        args = ("server", *ONE_THREAD, *tiny_args, *LIMITS)
        instances = [stack.enter_context(launched(tmp_path, name, *args)) for name in names]
        urls = [instance.url for instance in instances]
        router = stack.enter_context(launched(tmp_path, "router", "router", "--worker", *urls))
        for server in (*instances, router):
            server.wait_healthy()
        yield Cluster(instances, router)


@contextmanager
def frozen(instances: list[Launched]) -> Iterator[None]:
    """Freeze the workers of these instances while the block runs, however long it takes. Some may die in it."""
    workers = [instance.family()["worker"] for instance in instances]
    for worker in workers:
        freeze(worker.pid)
    try:
        yield
    finally:
        for worker in workers:
            if worker.is_running():
                worker.send_signal(signal.SIGCONT)


def requests_at(instance: Launched) -> int:
    return instance.info()["requests"]["total"]


def test_429s_of_one_client_leave_all_instances_in_rotation(cluster: Cluster) -> None:
    with ThreadPoolExecutor(COUNT * (QUEUE + 1)) as clients:
        with frozen(cluster.instances):
            held = [clients.submit(i.generate, **BODY) for i in cluster.instances for _ in range(QUEUE + 1)]
            for instance in cluster.instances:
                wait_until(lambda one=instance: requests_at(one) == QUEUE + 1, 30, "an instance is full")
            refused = [cluster.router.post("/generate", POISON).status_code for _ in range(GOOD_REQUESTS)]
            assert refused == [429] * GOOD_REQUESTS
        for answer in held:
            answer.result()
    for instance in cluster.instances:
        wait_until(lambda one=instance: requests_at(one) == 0, 30, "an instance is idle")
    cluster.serves_good_requests_everywhere()


def test_request_that_crashes_instances_leaves_the_others_in_rotation(cluster: Cluster) -> None:
    with ThreadPoolExecutor(1) as client, frozen(cluster.instances):
        answer = client.submit(cluster.router.post, "/generate", POISON)
        for _ in range(2):
            wait_until(lambda: any(map(requests_at, cluster.instances)), 30, "an instance has the request")
            (victim,) = [instance for instance in cluster.instances if requests_at(instance)]
            victim.family()["worker"].kill()
            assert victim.process is not None
            assert victim.process.wait(limit(30)) != 0
            cluster.instances.remove(victim)
        refused = answer.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "request_crashes_instances")
    assert cluster.router.post("/generate", POISON).json()["error"]["code"] == "request_crashes_instances"
    cluster.serves_good_requests_everywhere()
