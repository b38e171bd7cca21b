"""One instance as the router sees it: its address, its role, and whether it can be sent work.

UNKNOWN ──check passed──▶ HEALTHY ──check failed──▶ UNHEALTHY ──check passed──▶ HEALTHY
   ▲ └────check failed─────────────────────────────────▲
   └── a request failed there: the next check comes at once
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..messages.control import Identity, Pace
from ..runtime.disaggregation_options import DEFAULT_BOOTSTRAP_PORT
from ..runtime.web.ports import is_loopback
from .circuit_breaker import CircuitBreaker
from .membership import MemberState, Source
from .recent_failures import RecentFailures

logger = logging.getLogger(__name__)


class Role(StrEnum):
    """The kind of work that an instance gets. The values are labels of metrics."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "worker"


class HealthState(StrEnum):
    """Whether an instance can be sent work; UNKNOWN: not checked since the start, or since a request failed there."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


WELL_WITHIN = 0.75
"""Fraction of an ITL budget. An estimate above it is too close to the budget."""
SMALLER_PART = 0.5
"""Fraction of an ITL budget. Decode steps below it leave most of the budget to prompts."""
MAX_NAME = 255
"""Maximum characters of a name in a report."""
MAX_MS = 1e6
"""Longest time that a report may estimate, in milliseconds."""


class ReportedPace(Pace, frozen=True, forbid_unknown_fields=False):
    """A ``Pace`` in a report. The instance may be of another version, so other fields are ignored."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a negative number, and for a time above ``MAX_MS``."""
        times = (self.token_ms, self.decode_ms, self.stream_ms, self.budget_ms)
        if self.max_tokens < 0 or not all(0 <= ms <= MAX_MS for ms in times):
            raise ValueError("a pace out of bounds")


class ReportedIdentity(Identity, frozen=True, forbid_unknown_fields=False):
    """An ``Identity`` in a report. Other fields are ignored."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a text longer than ``MAX_NAME``, and for a port out of range."""
        if any(len(name) > MAX_NAME for name in (self.epoch, self.role, self.bootstrap_host)):
            raise ValueError("a name that is too long")
        if self.bootstrap_port is not None and not 1 <= self.bootstrap_port <= 65535:
            raise ValueError("no port")


class HealthReport(ReportedIdentity, frozen=True, forbid_unknown_fields=False):
    """An instance's report about itself in ``/health``."""

    pace: ReportedPace | None = None


class Asked(Protocol):
    """A request that the instance has; see ``Leg``."""

    def give_up(self, since: float, reason: str) -> None:
        """Let the request fail with ``reason``, because its instance hangs.

        Do nothing if the instance sent something for this request after ``since`` (``time.monotonic()``).
        """

    def instance_removed(self) -> None:
        """Let the request fail, because its instance was removed from the fleet."""


ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "unified": Role.UNIFIED}
"""Role by the word that an instance reports."""


@dataclass(eq=False)
class Instance:
    """One instance and the router's counts about it."""

    url: str
    role: Role
    """Current role: at first the one given with the URL, then the one that the instance reports."""
    bootstrap_port: int | None = None
    """Bootstrap port of a prefill, if it was given with the URL."""
    source: Source = Source.OPTION
    report: HealthReport = field(default_factory=HealthReport)
    """Last report of the instance about itself."""
    state: HealthState = HealthState.UNKNOWN
    reason: str = "not checked yet"
    was_healthy: bool = False
    """Whether a health check has ever passed."""
    withheld: MemberState | None = None
    """Why it gets no new requests although it may be healthy: CORDONED, DRAINING or GONE. None: it gets them."""
    in_flight: int = 0
    """Requests that it was sent and has not answered, legs of a pair included."""
    asked: int = 0
    """Questions of clients that it was sent and has not answered, such as to restore a session; reads do not count."""
    prompt_tokens: int = 0
    """Prompt tokens that it has to compute, until its answer begins or, at a pair's prefill, ends. 0 at a decode.

    Counted as soon as the instance is chosen, so the next choice sees it.
    """
    handed_over_tokens: int = 0
    """Part of ``prompt_tokens`` that it computes for decodes."""
    handed_over: int = 0
    """Prompts that it computes for decodes."""
    answers: int = 0
    """Prompts that it was sent for their whole answer, or for the part after the first token; a batch counts each.

    Counted as soon as the instance is chosen, so the next choice sees it.
    """
    requests: int = 0
    """Requests that it was ever sent."""
    failures: int = 0
    heard_at: float = 0.0
    """Time at which it last sent a part of an answer (``time.monotonic()``)."""
    alive_at: float = 0.0
    """Time at which it last answered a health check without reporting a hang (``time.monotonic()``)."""
    answers_questions: bool = True
    """Whether it answered its last health check and does not hang. A draining instance does, and has requests."""
    legs: set[Asked] = field(default_factory=set)
    """Requests that it has, as the router sees it."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    asked_again: bool = False
    """Whether its role is uncertain until its next answer, because another instance has left."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    recent_failures: RecentFailures = field(default_factory=RecentFailures)
    """Requests that it lately refused for load (429), or failed."""
    named: Role = field(init=False)
    """Role given with the URL."""
    _answers_at_report: int = 0
    """Number of answers that its reported pace includes."""

    def __post_init__(self) -> None:
        self.named = self.role

    def __str__(self) -> str:
        return f"{self.role} {self.url}"

    @property
    def host(self) -> str:
        """Host part of the URL, without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def bootstrap_address(self) -> tuple[str, int]:
        """Host and port at which decodes ask for this prefill's KV.

        The port given with the URL comes before the one that the instance reports. The reported host is used if no port
        was given. It is also used if the URL is a loopback one, which would mean another host to a decode elsewhere.
        """
        report = self.report
        knows_better = self.bootstrap_port is None or is_loopback(self.host)
        host = (report.bootstrap_host if knows_better else "") or self.host
        return host, self.bootstrap_port or report.bootstrap_port or DEFAULT_BOOTSTRAP_PORT

    @property
    def member_state(self) -> MemberState:
        """Its membership in the fleet."""
        return self.withheld or (MemberState.READY if self.was_healthy else MemberState.JOINING)

    @property
    def under_way(self) -> int:
        """Requests and questions of clients that it was sent and has not answered."""
        return self.in_flight + self.asked

    @property
    def is_idle(self) -> bool:
        """Whether it has no request and no question, chosen ones that were not sent yet included."""
        return not (self.under_way or self.answers or self.handed_over)

    @property
    def running(self) -> int:
        """Requests that it has: those that it answers, and the prompts that it computes for decodes."""
        return self.answers + self.handed_over

    @property
    def token_ms(self) -> float | None:
        """Estimated milliseconds per output token of one more request at this instance; None: unknown.

        It is the instance's own estimate, corrected for requests that came and went since then.
        """
        pace = self.report.pace
        return None if pace is None else self._since(pace, pace.token_ms)

    @property
    def decode_ms(self) -> float | None:
        """Estimated milliseconds per output token of one more request, without prompts in between; None: unknown."""
        pace = self.report.pace
        return None if pace is None else self._since(pace, pace.decode_ms)

    def _since(self, pace: Pace, reported_ms: float) -> float:
        return max(0.0, reported_ms + pace.stream_ms * (self.answers - self._answers_at_report))

    def forget_failures(self) -> None:
        """Close the circuit breaker and forget all failures, because the instance has come back."""
        self.breaker.forget()
        self.recent_failures.forget()

    def has_room_of(self, other: Instance) -> bool:
        """Return whether requests may become as long here as at ``other``, in tokens; False if either limit is unknown.

        It compares limits, not what is free.
        """
        mine, others = self.report.pace, other.report.pace
        return mine is not None and others is not None and mine.max_tokens >= others.max_tokens

    @property
    def keeps_pace(self) -> bool:
        """Whether one more request at this instance would get its tokens well within the ITL budget.

        It is true as well if decode steps alone take the smaller part of the budget. Then prompts take the time, and
        they would do so elsewhere. It is also true if no estimate or no budget is known.
        """
        pace, token_ms, decode_ms = self.report.pace, self.token_ms, self.decode_ms
        if pace is None or token_ms is None or decode_ms is None or not pace.budget_ms:
            return True
        return token_ms <= WELL_WITHIN * pace.budget_ms or decode_ms <= SMALLER_PART * pace.budget_ms

    def learn(self, report: HealthReport, answers: int | None = None) -> str | None:
        """Record an instance's report about itself; return why it cannot play its role, None if it can.

        The instance takes the role that it reports. If it was started anew, its circuit breaker is closed. ``answers``:
        what the field ``answers`` was when the report was asked for. None: its value now.
        """
        if report.epoch and self.report.epoch and report.epoch != self.report.epoch:
            logger.info("%s has been started anew", self)
            self.forget_failures()
        is_changed = report.bootstrap_port != self.report.bootstrap_port
        if is_changed and self.bootstrap_port and report.bootstrap_port not in (None, self.bootstrap_port):
            logger.warning(
                "%s says that its bootstrap port is %s; its URL came with %s, which decodes are told",
                *(self, report.bootstrap_port, self.bootstrap_port),
            )
        before, self.report = self.report, report
        self._answers_at_report = self.answers if answers is None else answers
        self._take_role(before)
        if report.role == "unified" and report.bootstrap_port is None and self.role is not Role.UNIFIED:
            return "it exchanges no KV: start it with --handover on, or name it by --worker"
        return None

    def _take_role(self, before: HealthReport) -> None:
        """Set the role by the instance's report; if it reports none, to the given one. ``before``: the previous report.

        An instance that reports "unified" can be either leg of a pair. It keeps its role, unless it reported "prefill"
        or "decode" before. Then it becomes a worker.
        """
        role = ROLES.get(self.report.role, self.named)
        if role is Role.UNIFIED and before.role not in ("prefill", "decode"):
            role = self.role
        if role is not self.role:
            logger.info("%s says that it is %s", self, self.report.role)
            self.role = role

    def summary(self) -> dict[str, Any]:
        """Describe the instance for ``/server_info``, ready for JSON."""
        return {
            "url": self.url,
            "role": self.role,
            "epoch": self.report.epoch or None,
            "bootstrap_port": self.bootstrap_address[1] if self.role is Role.PREFILL else None,
            "member_state": self.member_state,
            "state": self.state,
            "reason": self.reason,
            "in_flight": self.under_way,
            "prompt_tokens": self.prompt_tokens,
            "token_ms": self.token_ms if self.token_ms is None else round(self.token_ms, 3),
            "requests": self.requests,
            "failures": self.failures,
            "resting_seconds": round(self.breaker.seconds_left, 3),
        }
