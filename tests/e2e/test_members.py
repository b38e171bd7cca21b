"""Instances join and leave a router while clients use it: no request fails, and every answer is that of one server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, free_ports, launched, wait_until
from support.reader import Reader

CLIENTS = 3
TOKENS = 60
PROMPTS = [[100 + 7 * i + j for j in range(24 + 8 * i)] for i in range(4)]


def asked(i: int, *, streams: bool) -> dict[str, Any]:
    params = {"temperature": 0.7, "sampling_seed": i, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": PROMPTS[i], "sampling_params": params, "stream": streams}


class Load:
    """Clients that send one request after the other, streams and plain ones, until the block ends."""

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self._url, self._expected = url, expected
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        self.done = 0
        self.errors: list[BaseException] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(limit(120))

    def _run(self, number: int) -> None:
        try:
            while not self._ends.is_set():
                i, streams = number % len(PROMPTS), number % 2 == 0
                body = asked(i, streams=streams)
                if streams:
                    reader = Reader(self._url, "/generate", body)
                    reader.run()
                    assert reader.error is None, reader.error
                    last = reader.events[-1]
                else:
                    answer = httpx.post(self._url + "/generate", json=body, timeout=limit(120))
                    assert answer.status_code == 200, answer.text
                    last = answer.json()
                assert last.get("output_ids") == self._expected[i], last
                self.done += 1
                number += 1
        except BaseException as e:  # noqa: BLE001
            self.errors.append(e)

    def until(self, count: int) -> None:
        """Wait until ``count`` more requests have been answered."""
        goal = self.done + count
        wait_until(lambda: self.errors or self.done >= goal, 120, f"{count} more answers")
        assert self.errors == []


class Scene:
    """A router that started without instances."""

    def __init__(self, stack: ExitStack, folder: Path, args: list[str]) -> None:
        self._stack, self._folder, self._args = stack, folder, args
        self._bootstrap = free_ports(1)[0]
        self.prefill, self.first, self.second = map(self._start, ("prefill", "first", "second"))
        options = ["--allow-no-instances", "--admin-key-file", str(folder / "admin-key")]
        options += ["--health-check-interval", "0.2"]
        self.router = stack.enter_context(launched(folder, "router", "router", *options))
        wait_until(self._answers, 60, "the router answers")

    def _start(self, name: str) -> Launched:
        mode = "prefill" if name == "prefill" else "decode"
        cores = sorted(os.sched_getaffinity(0))
        own = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "tcp", *ONE_THREAD]
        own += ["--cpus", str(cores[0 if mode == "prefill" else -1])]
        if mode == "prefill":
            own += ["--disaggregation-bootstrap-port", str(self._bootstrap)]
        return self._stack.enter_context(launched(self._folder, name, "server", *own, *self._args))

    def _answers(self) -> bool:
        try:
            return self.router.client.get(self.router.url + "/livez").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, method: str, instance: Launched | None = None, **body: Any) -> httpx.Response:
        """Send an admin's request for ``/workers``."""
        named = {} if instance is None else {"url": instance.url}
        query, content = (None, named | body) if method == "POST" else (named, body)
        url = self.router.url + "/workers"
        return self.router.client.request(method, url, params=query, json=content if content else None)

    def states(self) -> dict[str, str]:
        """Return the state of each member by its URL."""
        return {worker["url"]: worker["state"] for worker in self.ask("GET").json()["workers"]}

    def add(self, *instances: Launched) -> None:
        """Add instances, of which only the URL is told, and wait until they get requests."""
        for instance in instances:
            assert self.ask("POST", instance).status_code == 201
        wait_until(lambda: all(self.states()[i.url] == "ready" for i in instances), 30, "they are ready")

    def sent(self, instance: Launched) -> int:
        """Return how many requests the router has sent to an instance."""
        return next(i["requests"] for i in self.router.info()["instances"] if i["url"] == instance.url)

    def is_idle(self, instance: Launched) -> bool:
        return next(w["in_flight"] for w in self.ask("GET").json()["workers"] if w["url"] == instance.url) == 0


@contextmanager
def scene(folder: Path, args: list[str]) -> Iterator[Scene]:
    with ExitStack() as stack:
        found = Scene(stack, folder, args)
        for instance in (found.prefill, found.first, found.second):
            instance.wait_healthy()
        yield found


@pytest.mark.timeout(400)
def test_a_decode_takes_over_from_another_under_load_and_no_request_fails(
    tmp_path: Path, tiny_args: list[str], alone: Launched
) -> None:
    expected = [alone.generate(**asked(i, streams=False))["output_ids"] for i in range(len(PROMPTS))]
    with scene(tmp_path, tiny_args) as cluster:
        refused = cluster.router.post("/generate", asked(0, streams=False))
        assert refused.status_code == 503
        assert "they join by POST /workers or --members-file" in refused.json()["error"]["message"]
        cluster.add(cluster.prefill, cluster.first)
        with Load(cluster.router.url, expected) as load:
            load.until(2 * CLIENTS)
            cluster.add(cluster.second)
            wait_until(lambda: load.errors or cluster.sent(cluster.second) > 1, 60, "the new one serves")

            assert cluster.ask("PATCH", cluster.first, state="cordoned").status_code == 200
            wait_until(lambda: load.errors or cluster.is_idle(cluster.first), 60, "the cordoned one has finished")
            before = cluster.sent(cluster.first)
            load.until(2 * CLIENTS)
            assert cluster.sent(cluster.first) == before

            assert cluster.ask("PATCH", cluster.first, state="ready").status_code == 200
            wait_until(lambda: load.errors or cluster.sent(cluster.first) > before, 60, "it serves again")
            assert cluster.ask("DELETE", cluster.first).status_code in (200, 202)
            wait_until(lambda: load.errors or cluster.first.url not in cluster.states(), 60, "it has drained")
            assert cluster.first.stop() == 0
            load.until(2 * CLIENTS)
        assert load.errors == []
        assert cluster.states() == {cluster.prefill.url: "ready", cluster.second.url: "ready"}
