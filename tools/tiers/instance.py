"""An instance for the time of a block, asked one request after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from pdserve.benchmark.errors import ServerError
from pdserve.runtime.python import python_command
from pdserve.runtime.web.ports import free_ports

from ..servers.admin_key import admin_key
from ..servers.child_processes import says_ok, stop

READY_SECONDS = 300.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 300.0
POLL_SECONDS = 0.1
BUSY_POLL_SECONDS = 0.005


class Answer(NamedTuple):
    """``seconds``: from the request to its whole answer, which is one token where the first one is measured.

    ``details``: cached tokens by tier, empty on an instance that has its pool alone.
    """

    tokens: list[int]
    cached: int
    details: dict[str, int]
    seconds: float


class Instance:
    """Where it listens, and its process."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path, admin: dict[str, str]) -> None:
        self._process, self._log, self._admin = process, log, admin
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_SECONDS, trust_env=False)

    def ask(self, tokens: list[int], count: int) -> Answer:
        """Send ``tokens`` as a prompt and return the answer of ``count`` greedy tokens, EOS ignored.

        Wait for all of it. Raises ``ServerError``.
        """
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        response = self._client.post("/generate", json={"input_ids": tokens, "sampling_params": sampling})
        seconds = time.perf_counter() - began
        if response.status_code != 200:
            raise ServerError(f"/generate answers {response.status_code}: {response.text[:200]}")
        answer = response.json()
        meta = answer["meta_info"]
        return Answer(answer["output_ids"], meta["cached_tokens"], meta.get("cached_tokens_details", {}), seconds)

    def post(self, body: dict[str, Any]) -> None:
        """Send the request ``body`` to ``/generate`` and wait for its end, without its answer.

        It is one leg of a request that another instance answers. Raises ``ServerError``.
        """
        response = self._client.post("/generate", json=body)
        if response.status_code != 200:
            raise ServerError(f"/generate answers {response.status_code}: {response.text[:200]}")

    def stream(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Stream the answer to ``body``; return its tokens, and for each the seconds from the request until it came.

        Raises ``ServerError``.
        """
        tokens: list[int] = []
        times: list[float] = []
        began = time.perf_counter()
        with self._client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                raise ServerError(f"/generate answers {response.status_code}: {response.read().decode()[:200]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ServerError(f"/generate answers {event['error']}")
                    tokens = event["output_ids"]
                    times += [time.perf_counter() - began] * (len(tokens) - len(times))
        return tokens, times

    def info(self) -> dict[str, Any]:
        """Return the JSON of ``/server_info``."""
        response: dict[str, Any] = self._client.get("/server_info", headers=self._admin).raise_for_status().json()
        return response

    def flush(self) -> None:
        """Drop all prefixes that the instance has cached in KV pool and host memory. The store keeps its pages."""
        self._client.post("/flush_cache", json={}, headers=self._admin).raise_for_status()

    def wait_busy(self) -> None:
        """Wait, without limit, until the instance has a request."""
        while not self.info()["requests"]["total"]:
            time.sleep(BUSY_POLL_SECONDS)

    def wait_stored(self) -> None:
        """Wait until the store has all pages that are to be saved. Raises ``ServerError`` if the store fails."""
        while (tiers := self.info()["tiers"])["backlog"] or tiers["stored"] + tiers["fetched"] < tiers["saved"]:
            if tiers["store"]["breaker"] != "closed":
                raise ServerError(f"the store fails: {tiers['store']['reason']}")
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill all processes of the instance by SIGKILL, and wait for the end of the first one."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_ready(self) -> None:
        """Wait until the instance answers ``/health``.

        Raises ``ServerError`` if it ends or takes over ``READY_SECONDS``.
        """
        deadline = time.monotonic() + READY_SECONDS
        while not says_ok(self._client, "/health"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
                raise ServerError(f"the instance did not become ready:\n{tail}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the instance, by force after ``STOP_SECONDS``. Do nothing if it has ended."""
        self._client.close()
        stop(self._process, STOP_SECONDS, self.kill)


@contextmanager
def instance(folder: Path, *flags: str) -> Iterator[Instance]:
    """Run ``pdserve server FLAGS`` on a free port within the ``with`` block. Yield it when it is ready.

    Its log is in ``folder``. Raises ``ServerError`` if it does not become ready.
    """
    [port] = free_ports(1)
    admin, more = admin_key(folder)
    argv = python_command("-m", "pdserve.server.cli", "server", "--port", str(port), *flags, *more)
    log = folder / "instance.log"
    with log.open("ab") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    started = Instance(port, process, log, admin)
    try:
        started.wait_ready()
        yield started
    finally:
        started.close()
