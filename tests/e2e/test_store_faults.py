"""Whatever happens to a store of KV pages: every answer has the tokens that it has without one, in time.

``make test`` strikes each store once in each way, ``make test-slow`` 300 times in all (``PDSERVE_STORE_FAULTS``), and
kills the instance in between.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, launched, wait_until
from support.redis_server import SERVER
from support.store_faults import FolderFaults, RedisFaults, small_disk

FAULTS = int(os.environ.get("PDSERVE_STORE_FAULTS", "300"))
TOKENS = 8
PROMPTS = [[(7 * i * (k + 1) + k) % 90 + 3 for i in range(400 + 16 * k)] for k in range(9)]
PATIENCE_SECONDS = 15.0
"""Any answer is here by then, or hangs: a request waits 10 s for a store at most."""
POOL = ["--max-total-tokens", "1024", "--hicache-ratio", "1.5", "--hicache-storage-timeout", "0.3"]
KILL_EVERY = 50


def ask(server: Launched, prompt: list[int], namespace: str = "") -> tuple[list[int], float]:
    """Return the tokens of an answer, and its seconds."""
    began = time.monotonic()
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = server.generate(input_ids=prompt, sampling_params=sampling, extra_key=namespace)
    return answer["output_ids"], time.monotonic() - began


@pytest.fixture(scope="module")
def expected(alone):
    """Answers of an instance without tiers."""
    return [ask(alone, prompt)[0] for prompt in PROMPTS]


class Campaign:
    """One store after another fault, and the instances over it."""

    def __init__(self, faults, expected, seed: int) -> None:
        self.faults, self.expected, self.rng = faults, expected, random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.late: list[str] = []
        self.slowest = 0.0
        self.opened = self.from_store = self.asked = 0

    def strike(self, server: Launched, kind: str) -> None:
        """Cause a fault once, with requests before, during and after it."""
        self.struck[kind] += 1
        with ThreadPoolExecutor(3) as clients:
            # Some are under way when it happens.
            before = [clients.submit(self.ask, server, kind) for _ in range(self.rng.randrange(3))]
            heal = self.faults.kinds[kind](self.rng)
            for one in before:
                one.result()
            # In a namespace of its own a prompt has pages that the store has yet to get.
            fresh = [clients.submit(self.ask, server, kind, f"{self.struck.total()}-{i}") for i in range(2)]
            for one in [*fresh, clients.submit(self.ask, server, kind)]:
                one.result()
        if kind in self.faults.dead and self.struck[kind] % 4 == 1:
            # A failed command is tried three times, even without requests, before the circuit breaker opens.
            wait_until(lambda: not self.is_well(server), 10, f"{kind} is reported", every=0.1)
        health = server.client.get(server.url + "/health")
        assert health.status_code == 200, health.text
        self.opened += "KV store" in health.json().get("warning", "")
        heal()
        # It is found well again even without requests; otherwise the next fault would not be noticed.
        wait_until(lambda: self.is_well(server), 10, f"the store is used again after: {kind}", every=0.1)
        self.ask(server, f"behind {kind}")

    def ask(self, server: Launched, when: str, namespace: str = "") -> None:
        """Continue the conversation with the oldest turn: it has left pool and host."""
        self.asked += 1
        which = self.asked % len(PROMPTS)
        tokens, seconds = ask(server, PROMPTS[which], namespace)
        self.slowest = max(self.slowest, seconds)
        if tokens != self.expected[which]:
            self.wrong.append(when)
        if seconds > limit(PATIENCE_SECONDS):
            self.late.append(when)

    def is_well(self, server: Launched) -> bool:
        return "warning" not in server.client.get(server.url + "/health").json()

    def ended(self, server: Launched) -> None:
        """Check an instance that is about to end."""
        wait_until(lambda: server.info()["invariants_steps_ago"] == 0, 15, "checked while idle")
        report = server.info()
        assert report["invariants"] == "ok"
        self.from_store += report["tiers"]["hit_store"]

    def verdict(self) -> str:
        return (
            f"{self.struck.total()} faults {dict(self.struck)}: {len(self.wrong)} wrong, {len(self.late)} late, "
            f"slowest answer {self.slowest:.1f} s, store left alone in {self.opened}, {self.from_store} tokens from it"
        )


@pytest.fixture(params=["file", "redis"])
def faults(request, tmp_path):
    with ExitStack() as stack:
        if request.param == "file":
            disk = tmp_path / "disk"
            mounted = stack.enter_context(small_disk(disk, 8))
            yield FolderFaults(disk, mounted=mounted)
            return
        if SERVER is None:
            pytest.skip("redis-server is not installed (Debian: redis-server)")
        faults = RedisFaults(tmp_path)
        stack.callback(faults.close)
        yield faults


def run(tmp_path, tiny_args, faults, expected, kinds: list[str]) -> Campaign:
    """Strike in these ways, one after the other; every now and then the instance is killed, too."""
    campaign = Campaign(faults, expected, len(kinds))
    kind, url = faults.args
    args = [*ONE_THREAD, *tiny_args, *POOL, "--enable-hierarchical-cache", "--hicache-storage-backend", kind]
    args += ["--hicache-storage-url", url, "--hicache-storage-prefetch-policy", "wait_complete"]
    for begin in range(0, len(kinds), KILL_EVERY):
        with launched(tmp_path, f"instance-{begin}", "server", *args) as server:
            server.wait_healthy()
            for i in range(len(PROMPTS)):
                assert ask(server, PROMPTS[i])[0] == expected[i]
            for struck in kinds[begin : begin + KILL_EVERY]:
                campaign.strike(server, struck)
            campaign.ended(server)
            server.stop(signal.SIGKILL)
    print(campaign.verdict())
    assert not campaign.wrong + campaign.late, campaign.verdict()
    assert campaign.from_store, campaign.verdict()
    assert campaign.opened, campaign.verdict()
    return campaign


def test_each_fault_once(tmp_path, tiny_args, faults, expected):
    run(tmp_path, tiny_args, faults, expected, list(faults.kinds))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_campaign(tmp_path, tiny_args, faults, expected):
    rng = random.Random(17)
    run(tmp_path, tiny_args, faults, expected, rng.choices(list(faults.kinds), k=FAULTS // 2))
