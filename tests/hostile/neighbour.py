"""A well-behaved user beside the attack. Its answers are known beforehand, and its data carries canaries."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from .cluster import ALICE, Cluster
from .neighbour_responses import EXCUSED, NeighbourResponses

SOURCE = "127.0.0.2"
"""Address that the neighbour connects from: shares of connections are by address."""
QUESTIONS = 24
TOKENS = 24
PAUSE_SECONDS = 0.05
RESPONSES_SHARE = 0.1
"""Share of the turns in which the neighbour reads its kept responses and goes on with them."""


@dataclass(frozen=True)
class Question:
    """A prompt with a canary, its token ids, and the only right answer."""

    text: str
    ids: list[int]
    answer: list[int]


class Neighbour:
    """Asks in a thread until ``stop``. ``canary``: in its prompts, request names, session names and ``user``."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._client = cluster.client(ALICE, SOURCE)
        self._rng = random.Random(seed)
        self.canary = f"canary{secrets.token_hex(6)}"
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []
        self.slowest = 0.0
        self.foreign: list[bytes] = []
        """What the neighbour must never be sent."""
        self.questions = [self._question(i) for i in range(QUESTIONS)]
        self.responses = NeighbourResponses(cluster, self._client, self.canary)
        self._session = f"{self.canary}-session"
        self._snapshot(self._session)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)

    @property
    def secrets(self) -> list[bytes]:
        """Return what no other user may get: the canary, its key, and parts of prompts and answers as token ids."""
        found = [self.canary.encode(), self._cluster.keys[ALICE].encode(), *self.responses.secrets]
        for question in self.questions:
            for ids in (question.ids[4:12], question.answer[4:12]):
                found += [json.dumps(ids)[1:-1].encode(), json.dumps(ids, separators=(",", ":"))[1:-1].encode()]
        return found

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present question, and delete the session."""
        self._stop.set()
        self._thread.join()
        self._client.delete(f"{self._cluster.url}/kv/sessions/{self._session}")

    def ask_all(self) -> None:
        """Ask every question once, and for the kept responses."""
        self._check_responses()
        for question in self.questions:
            self._ask(question, stream=False)

    def _check_responses(self) -> None:
        before = len(self.responses.problems)
        self.responses.check()
        self.problems += self.responses.problems[before:]

    def _question(self, i: int) -> Question:
        words = " ".join(f"{self._rng.choice('bcdfgklmnprst')}a{self._rng.randrange(10**6)}" for _ in range(20))
        text = f"{words} {i} {self.canary}"  # the first page is of this prompt alone
        tokens = self._client.post(f"{self._cluster.url}/tokenize", json={"prompt": text}).raise_for_status().json()
        answers = [self._client.post(f"{self._cluster.url}/generate", json=self._body(text)) for _ in range(2)]
        outputs = [answer.raise_for_status().json()["output_ids"] for answer in answers]
        assert outputs[0] == outputs[1], f"from the cache the answer is another: {outputs}"
        return Question(text, tokens["tokens"], outputs[0])

    def _body(self, text: str) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        return {"text": text, "sampling_params": params, "rid": f"{self.canary}-{secrets.token_hex(4)}"}

    def _snapshot(self, name: str) -> None:
        answer = self._client.post(f"{self._cluster.url}/kv/snapshot", json={"name": name, "text": f"{self.canary} x"})
        assert answer.status_code == 200, answer.text

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            self._ask(self._rng.choice(self.questions), stream=self._rng.random() < 0.5)
            if self._rng.random() < RESPONSES_SHARE:
                self._check_responses()
            self._stop.wait(PAUSE_SECONDS)

    def _ask(self, question: Question, *, stream: bool) -> None:
        began, body = time.monotonic(), self._body(question.text) | {"stream": stream, "user": self.canary}
        try:
            answer = self._client.post(f"{self._cluster.url}/generate", json=body)
        except httpx.HTTPError as e:
            self.problems.append(f"its connection broke: {e!r}")
            return
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            if answer.status_code not in EXCUSED:
                self.problems.append(f"status {answer.status_code}: {answer.text[:500]}")
            return
        self.problems += [f"it was sent {word!r}" for word in self.foreign if word in answer.content]
        try:
            ids = last_event(answer.text) if stream else answer.json()["output_ids"]
        except (ValueError, KeyError, IndexError) as e:
            self.problems.append(f"no answer ({e!r}): {answer.text[-500:]}")
            return
        if ids != question.answer:
            self.problems.append(f"wrong tokens: {ids}, not {question.answer}; its answer: {answer.text[-300:]}")


def last_event(text: str) -> list[int]:
    """Return the output of a stream's last event."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    ids: list[int] = json.loads(events[-1])["output_ids"]
    return ids
