"""One instance as the router sees it: where it is, what it does, and whether it can be sent work.

UNKNOWN ──check passed──▶ HEALTHY ──check failed──▶ UNHEALTHY ──check passed──▶ HEALTHY
   ▲ └────check failed─────────────────────────────────▲
   └── a request failed there: the next check comes at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from .rest import Rest


class Role(StrEnum):
    """What an instance is sent."""

    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"


class HealthState(StrEnum):
    """Whether an instance can be sent work; UNKNOWN: not checked since the start, or since a request failed there."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(eq=False)
class Instance:
    """One instance and what the router counts about it. ``bootstrap_port`` is set for prefill instances only.

    ``prompt_tokens``: of prompts that it was sent to compute and, as far as the router can see, has not done with.
    """

    url: str
    role: Role
    bootstrap_port: int | None = None
    state: HealthState = HealthState.UNKNOWN
    reason: str = "not checked yet"
    in_flight: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    failures: int = 0
    heard_at: float = 0.0
    """When it last sent a part of an answer (``time.monotonic()``)."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    rest: Rest = field(default_factory=Rest)

    def __str__(self) -> str:
        return f"{self.role} {self.url}"

    @property
    def host(self) -> str:
        """The host part of the URL, without brackets."""
        return urlsplit(self.url).hostname or ""

    @contextmanager
    def computing(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Count a prompt as waiting here until the block ends, or the function that it gives is called."""
        waiting = tokens

        def done() -> None:
            nonlocal waiting
            self.prompt_tokens -= waiting
            waiting = 0

        self.prompt_tokens += tokens
        try:
            yield done
        finally:
            done()

    def summary(self) -> dict[str, Any]:
        """JSON-ready view for ``/server_info``."""
        return {
            "url": self.url,
            "role": self.role,
            "bootstrap_port": self.bootstrap_port,
            "state": self.state,
            "reason": self.reason,
            "in_flight": self.in_flight,
            "prompt_tokens": self.prompt_tokens,
            "requests": self.requests,
            "failures": self.failures,
            "resting_seconds": round(self.rest.seconds_left, 3),
        }
