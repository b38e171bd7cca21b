"""Clients that ask without end until they are told to stop, and keep what they were told and when."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from support.machine import stretched
from support.processes import NO_REUSE

from .expected import MOST_TOKENS, Question

CLIENTS = 6
ANSWER_SECONDS = 60.0
"""A client gives up: long after its request was late."""
PAUSE_SECONDS = (0.0, 0.15)
AFTER_ERROR_SECONDS = 0.2


@dataclass
class Answer:
    """The course of one request; times are of ``time.monotonic``.

    ``event_times``: of each event. ``status``: that of HTTP, None if the connection broke before. ``reason``: the
    server's finish reason. ``error``: that of the server or of the connection.
    """

    question: Question
    wanted: int
    streaming: bool
    asked: float
    tokens: list[int] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    status: int | None = None
    reason: str = ""
    error: str = ""
    broken: bool = False
    done: bool = False
    end: float = 0.0


class Load:
    """``CLIENTS`` threads; ``finish`` lets each end its last request and gives back all answers."""

    def __init__(self, url: str, questions: Sequence[Question], seed: int) -> None:
        self._url, self._questions = url, questions
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._ask_on, args=(seed * 100 + i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[Answer]:
        """Stop asking and wait for the answers; an AssertionError where a client hangs."""
        self._stop.set()
        deadline = time.monotonic() + stretched(ANSWER_SECONDS) + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a client hangs"
        return self.answers

    def _ask_on(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=stretched(ANSWER_SECONDS), limits=NO_REUSE, trust_env=False) as client:
            while not self._stop.is_set():
                wanted = rng.choice((1, 2, 16, 60, MOST_TOKENS))
                answer = Answer(rng.choice(self._questions), wanted, rng.random() < 0.6, time.monotonic())
                self.answers.append(answer)
                try:
                    ask(client, self._url, answer)
                except httpx.HTTPError as e:
                    answer.broken, answer.error = True, repr(e)
                answer.end = time.monotonic()
                pause = AFTER_ERROR_SECONDS if answer.error else rng.uniform(*PAUSE_SECONDS)
                self._stop.wait(pause)


def body(question: Question, wanted: int, streaming: bool) -> dict:
    """Return the body of a request to /generate."""
    params = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
    return {"input_ids": question.prompt, "sampling_params": params, "stream": streaming, "incremental": True}


def ask(client: httpx.Client, url: str, answer: Answer) -> None:
    """Send the request and fill in what comes back."""
    asked = body(answer.question, answer.wanted, answer.streaming)
    with client.stream("POST", url + "/generate", json=asked) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = response.read().decode(errors="replace")
        elif answer.streaming:
            for line in response.iter_lines():
                hear(answer, line)
        else:
            take(answer, json.loads(response.read()))
            answer.done = True


def hear(answer: Answer, line: str) -> None:
    """Take in one line of a stream."""
    if line == "data: [DONE]":
        answer.done = True
    elif line.startswith("data: "):
        take(answer, json.loads(line[6:]))


def take(answer: Answer, event: dict) -> None:
    """Take in an event: tokens, the end, or an error."""
    answer.event_times.append(time.monotonic())
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    answer.tokens += event["output_ids"]
    reason = event["meta_info"]["finish_reason"]
    if reason is not None:
        answer.reason = reason["type"]
