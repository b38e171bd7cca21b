"""Full pools with real processes: 60 prompts of a quarter of the pool at once.

Half of them go to the router and half straight to the decode, with three priorities, fair shares, and roles that are
swapped meanwhile. All are answered, with the tokens of one server. ``PDSERVE_FULL_POOLS=real`` takes the default model,
for meaningful figures. ``make test`` plays such bursts with simulated instances (``tests/campaigns``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.processes import ONE_THREAD, Launched, free_ports, launched, wait_until

POOL = 2048
COUNT = 60
PRIORITIES = (0, 10, 50)
IS_REAL = os.environ.get("PDSERVE_FULL_POOLS") == "real"
SWAP_SECONDS = 2.5 if IS_REAL else 0.1
PROMPTS = [[(i * 7919 + j * 31) % 40000 + 100 for j in range(POOL // 4 - 12)] for i in range(COUNT)]
WITH_PRIORITIES = "--enable-priority-scheduling"


@dataclass
class Two:
    """A prefill and a decode that may swap their roles, and a router before them."""

    router: Launched
    instances: list[Launched]
    is_over: threading.Event = field(default_factory=threading.Event)

    def decode(self) -> Launched:
        return next(i for i in self.instances if i.info()["role"] == "decode")

    def swap(self) -> None:
        """Swap the roles of the instances again and again, until the test is over."""
        while not self.is_over.wait(SWAP_SECONDS):
            roles = [instance.info()["role"] for instance in self.instances]
            for instance, role in zip(self.instances, reversed(roles), strict=True):
                assert instance.post("/role", {"role": role}).status_code == 200


@contextmanager
def two_instances(tmp: Path, *args: str) -> Iterator[Two]:
    ports = free_ports(2)
    with ExitStack() as stack:
        servers = []
        for i, role in enumerate(("prefill", "decode")):
            own = ["--disaggregation-mode", role, "--handover", "on", "--disaggregation-transfer-backend", "shm"]
            own += ["--disaggregation-bootstrap-port", str(ports[i]), "--max-total-tokens", str(POOL), *ONE_THREAD]
            servers.append(stack.enter_context(launched(tmp, f"i{i}", "server", *own, *args)))
        route = ["--prefill", servers[0].url, str(ports[0]), "--decode", servers[1].url]
        router = stack.enter_context(launched(tmp, "router", "router", *route, "--retry-window", "30"))
        for server in (*servers, router):
            server.wait_healthy()
        yield Two(router, servers)


def body(i: int, **more) -> dict:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return {"input_ids": PROMPTS[i], "sampling_params": params, "user": f"u{i % 5}", **more}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, request) -> list[list[int]]:
    """What one server answers."""
    if not IS_REAL:
        alone = request.getfixturevalue("alone")
        return [alone.generate(**body(i))["output_ids"] for i in range(COUNT)]
    with launched(tmp_path_factory.mktemp("real"), "alone", "server", *ONE_THREAD) as server:
        server.wait_healthy()
        return [server.generate(**body(i))["output_ids"] for i in range(COUNT)]


@pytest.mark.parametrize(
    ("args", "swaps"),
    [
        pytest.param((), False, marks=pytest.mark.slow),
        pytest.param((WITH_PRIORITIES,), False, marks=pytest.mark.slow),
        pytest.param((WITH_PRIORITIES,), True, marks=pytest.mark.slow),
        pytest.param((WITH_PRIORITIES, "--fair-scheduling"), False, marks=pytest.mark.slow),
        pytest.param((WITH_PRIORITIES, "--disaggregation-threshold", "200"), False, marks=pytest.mark.slow),
    ],
    ids=["no priorities", "priorities", "roles swapped", "fair shares", "threshold"],
)
def test_every_request_of_a_burst_is_answered(tmp_path, tiny_args, args, swaps, expected) -> None:
    seconds: dict[int, list[float]] = {priority: [] for priority in PRIORITIES}

    def ask(cluster: Two, i: int) -> None:
        began = time.monotonic()
        # Half of the burst comes before any role is swapped, so the decode is the decode.
        server = cluster.router if i % 2 else cluster.decode()
        more = {"priority": PRIORITIES[i % 3]} if args else {}
        assert server.generate(**body(i, **more))["output_ids"] == expected[i]
        seconds[PRIORITIES[i % 3]].append(time.monotonic() - began)

    with (
        two_instances(tmp_path, *(() if IS_REAL else tiny_args), *args) as cluster,
        ThreadPoolExecutor(COUNT + 1) as clients,
    ):
        swapper = clients.submit(cluster.swap) if swaps else None
        try:
            for answer in [clients.submit(ask, cluster, i) for i in range(COUNT)]:
                answer.result()
        finally:
            cluster.is_over.set()
        if swapper is not None:
            swapper.result()
        for instance in cluster.instances:
            wait_until(lambda one=instance: one.info()["pool"]["in_use"] == 0, 15, "its memory is free")
        summary = {
            priority: f"{sorted(took)[len(took) // 2]:.2f} / {max(took):.2f}" for priority, took in seconds.items()
        }
        withdrawn = sum(i.info()["disaggregation"]["received"]["withdrawn"] for i in cluster.instances)
        print(f"\n{args}, swaps {swaps}: seconds by priority, median / longest: {summary}; withdrawn {withdrawn}")
