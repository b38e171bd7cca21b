"""A client that reads one stream, in a thread of its own."""

from __future__ import annotations

import itertools
import json
import threading
import time

import httpx

from .machine import limit
from .processes import wait_until


class Reader(threading.Thread):
    """One client, which reads its stream to the end. ``events``: what it was told, parsed."""

    def __init__(self, url: str, path: str, body: dict) -> None:
        super().__init__()
        self.url, self.path, self.body = url, path, body
        self.events: list[dict] = []
        self.raw: list[str] = []
        self.at: list[float] = []
        """When each event came (``time.monotonic()``)."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + self.path, json=self.body, timeout=limit(120)) as stream:
                assert stream.status_code == 200, stream.read()
                for line in stream.iter_lines():
                    self.raw.append(line)
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                        self.at.append(time.monotonic())
        except BaseException as e:  # noqa: BLE001
            self.error = e

    def met(self, tokens: int) -> None:
        """Wait until ``tokens`` events have come."""
        wait_until(lambda: self.error or len(self.events) >= tokens, 30, f"{tokens} events; {self.error}")

    @property
    def longest_gap(self) -> float:
        """Seconds, between two events."""
        return max((later - sooner for sooner, later in itertools.pairwise(self.at)), default=0.0)

    def ended(self) -> list[dict]:
        """Wait for the end, and return all events."""
        self.join(limit(120))
        assert self.error is None, self.error
        assert self.raw[-2:] == ["data: [DONE]", ""], self.raw[-4:]
        assert not any("error" in event for event in self.events), self.events[-1]
        return self.events
