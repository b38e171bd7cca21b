"""Hundreds of requests that end early, in every state of their hand-over, cost a pair nothing."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
from support.machine import limit
from support.processes import NO_REUSE, Pair

STORM, CLIENTS = int(os.environ.get("PDSERVE_STORM_REQUESTS", "120")), 40
"""How many, and how many at a time."""
LONGEST_SECONDS = 0.6
"""Longest time that a request runs before it is ended. The time is drawn for each."""
TOKENS = 1000
"""Output tokens of a request: more than most requests generate before they are ended."""
PROMPT = list(range(200, 500))
STATES = {"queued", "pushing", "transferring", "draining"}
"""States of a hand-over that last longer than between two looks; the others are passed through all the more."""
MOST_STORMS = 4
"""Largest number of storms until all states were seen. On a fast machine, no hand-over may drain that long."""


def body(prompt: list[int], tokens: int, **fields) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    } | fields


def end_of(event: dict) -> str:
    """Return how a request ended with this event, or "" if it goes on."""
    if "error" in event:
        return "error"
    reason = event["meta_info"]["finish_reason"]
    return "" if reason is None else reason["type"]


class Storm:
    """Clients that ask and, after a while, hang up or have their request aborted by its name."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self._url = pair.router.url
        self._seed = seed
        self._rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.refused: list[str] = []

    def plan(self) -> list[tuple[int, list[int], float, bool]]:
        """Draw for each request its number, prompt, seconds until its end, and whether it is ended by name."""
        lengths = (3, 40, 150, 400, 900)
        return [
            (
                number,
                [self._rng.randrange(100, 40000) for _ in range(self._rng.choice(lengths))],
                self._rng.uniform(0, LONGEST_SECONDS),
                self._rng.random() < 0.5,
            )
            for number in range(STORM)
        ]

    def ask(self, number: int, prompt: list[int], seconds: float, by_name: bool) -> None:
        """Send one request of the storm and end it."""
        rid = f"storm-{self._seed}-{number}"
        asked = body(prompt, TOKENS, rid=rid, stream=True)
        with httpx.Client(timeout=limit(30), limits=NO_REUSE, trust_env=False) as client:
            over = threading.Event()
            ender = threading.Thread(target=self._abort, args=(rid, seconds, over)) if by_name else None
            if ender is not None:
                ender.start()
            # A client that hangs up does so at any point: before headers, or between two events.
            waits = limit(30) if by_name else max(0.001, seconds)
            try:
                with suppress(httpx.TimeoutException), self._stream(client, asked, waits) as lines:
                    hung_up_at = None if by_name else time.monotonic() + seconds
                    for line in lines:
                        if line.startswith("data: {"):
                            self.ends[end_of(json.loads(line[6:]))] += 1
                        if hung_up_at is not None and time.monotonic() > hung_up_at:
                            break
            finally:
                over.set()
                if ender is not None:
                    ender.join()

    @contextmanager
    def _stream(self, client: httpx.Client, asked: dict, seconds: float) -> Iterator[Iterator[str]]:
        timeout = httpx.Timeout(limit(30), read=seconds)
        with client.stream("POST", self._url + "/generate", json=asked, timeout=timeout) as response:
            yield response.iter_lines()

    def _abort(self, rid: str, seconds: float, over: threading.Event) -> None:
        """Abort a request after ``seconds`` and again until it is over: on a busy machine an abort may overtake it."""
        over.wait(seconds)
        self._abort_once(rid)
        while not over.wait(0.5):
            self._abort_once(rid)

    def _abort_once(self, rid: str) -> None:
        asked = {"json": {"rid": rid}, "timeout": limit(30), "trust_env": False}
        try:
            answer = httpx.post(self._url + "/abort_request", **asked)
            if answer.status_code != 200:
                self.refused.append(answer.text)
        except httpx.HTTPError as e:
            self.refused.append(repr(e))


class States:
    """States of the hand-overs of both instances, polled by a thread."""

    def __init__(self, pair: Pair) -> None:
        self.seen: set[str] = set()
        self._servers = (pair.prefill, pair.decode)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> States:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for server in self._servers:
                answer_body = json.loads(server.client.get(server.url + "/transfers").raise_for_status().text)
                self.seen |= {transfer["state"] for transfer in answer_body["transfers"]}


def test_requests_that_end_early(small_pair):
    pair = small_pair
    answer = pair.router.generate(**body(PROMPT, TOKENS))["output_ids"]
    before = processes(pair)
    storms: list[Storm] = []
    with States(pair) as states, ThreadPoolExecutor(CLIENTS) as clients:
        while not storms or (not states.seen >= STATES and len(storms) < MOST_STORMS):
            storms.append(storm := Storm(pair, len(storms) + 1))
            for done in [clients.submit(storm.ask, *planned) for planned in storm.plan()]:
                done.result()
    assert states.seen >= STATES, states.seen
    for storm in storms:
        assert storm.refused == []
        assert storm.ends["abort"] > STORM / 4, "half were to be aborted by name, some of which were refused"
        assert storm.ends["length"] < STORM / 20, "hardly any was to get to its end"
    pair.assert_all_returned()
    assert processes(pair) == before
    assert pair.router.generate(**body(PROMPT, TOKENS))["output_ids"] == answer
    for server in (pair.prefill, pair.decode):
        assert "Traceback" not in server.log()


def processes(pair: Pair) -> list[int]:
    """Return the pids of all living processes of the pair."""
    servers = (pair.prefill, pair.decode, pair.router)
    return sorted(process.pid for server in servers for process in server.family().values())
