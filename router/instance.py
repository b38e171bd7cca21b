"""One instance as the router sees it: where it is, what it does, and whether it can be sent work.

UNKNOWN ──check passed──▶ HEALTHY ──check failed──▶ UNHEALTHY ──check passed──▶ HEALTHY
   ▲ └────check failed─────────────────────────────────▲
   └── a request failed there: the next check comes at once
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import msgspec

from ..runtime.web.ports import is_loopback
from .options import DEFAULT_BOOTSTRAP_PORT
from .rest import Rest

logger = logging.getLogger(__name__)


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


Name = Annotated[str, msgspec.Meta(max_length=255)]


class Told(msgspec.Struct):
    """What an instance's ``/health`` says of it; see ``Identity``."""

    epoch: Name = ""
    role: Name = ""
    bootstrap_host: Name = ""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class Asked(Protocol):
    """A request that the instance has; see ``Leg``."""

    def give_up(self, since: float, reason: str) -> None:
        """The instance hangs: fail, unless it has said something of this request since (monotonic)."""


ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "unified": Role.WORKER}
"""By what an instance says it is now."""


@dataclass(eq=False)
class Instance:
    """One instance and what the router counts about it. ``bootstrap_port``: of prefill instances, where it was given.

    ``role``: as it was named, or, of an instance of pairs, what it says it is now. ``prompt_tokens``: of prompts that
    it was sent to compute and, as far as the router can see, has not done with. ``told``: what it has said of itself
    last.
    """

    url: str
    role: Role
    bootstrap_port: int | None = None
    told: Told = field(default_factory=Told)
    state: HealthState = HealthState.UNKNOWN
    reason: str = "not checked yet"
    in_flight: int = 0
    prompt_tokens: int = 0
    requests: int = 0
    failures: int = 0
    heard_at: float = 0.0
    """When it last sent a part of an answer (``time.monotonic()``)."""
    legs: set[Asked] = field(default_factory=set)
    """Requests that it has, as the router sees it."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    rest: Rest = field(default_factory=Rest)
    named: Role = field(init=False)
    """What the options call it."""

    def __post_init__(self) -> None:
        self.named = self.role

    def __str__(self) -> str:
        return f"{self.role} {self.url}"

    @property
    def host(self) -> str:
        """The host part of the URL, without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def bootstrap_address(self) -> tuple[str, int]:
        """Where decodes ask for this prefill's KV.

        What the options say goes before what it has said of itself. But a loopback address that the router reaches it
        at means another host to a decode on another one.
        """
        told = self.told
        knows_better = self.bootstrap_port is None or is_loopback(self.host)
        host = (told.bootstrap_host if knows_better else "") or self.host
        return host, self.bootstrap_port or told.bootstrap_port or DEFAULT_BOOTSTRAP_PORT

    def learn(self, told: Told) -> str | None:
        """Take note of what it says of itself; returns why it can't do what it is here for, None where it can."""
        if told.epoch and self.told.epoch and told.epoch != self.told.epoch:
            logger.info("%s has been started anew", self)
            self.rest.forget()
        if told != self.told and self.bootstrap_port and told.bootstrap_port not in (None, self.bootstrap_port):
            logger.warning(
                "%s says that its bootstrap port is %s; --prefill says %s, which decodes are told",
                *(self, told.bootstrap_port, self.bootstrap_port),
            )
        before, self.told = self.told, told
        self._take_role(before)
        if told.role == "unified" and told.bootstrap_port is None and self.role is not Role.WORKER:
            return "it exchanges no KV: start it with --handover on, or name it by --worker"
        return None

    def _take_role(self, before: Told) -> None:
        """It knows best what it is; but one that says it is unified does either leg's work where it was named for it,
        unless it was something else before."""
        role = ROLES.get(self.told.role, self.named)
        if role is Role.WORKER and before.role not in ("prefill", "decode"):
            role = self.role
        if role is not self.role:
            logger.info("%s says that it is %s", self, self.told.role)
            self.role = role

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
            "epoch": self.told.epoch or None,
            "bootstrap_port": self.bootstrap_address[1] if self.role is Role.PREFILL else None,
            "state": self.state,
            "reason": self.reason,
            "in_flight": self.in_flight,
            "prompt_tokens": self.prompt_tokens,
            "requests": self.requests,
            "failures": self.failures,
            "resting_seconds": round(self.rest.seconds_left, 3),
        }
