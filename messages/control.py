"""Questions about the instance itself, and the supervisor's messages.

A question takes the way of requests: HTTP → tokenizer → scheduler → detokenizer → HTTP. So its answer proves that each
of these processes is alive.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .base import Message
from .question import Answer, Question

MAX_TRANSFERS = 1000


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of an instance, for routers."""

    epoch: str = ""
    role: str = ""
    """Current role."""
    bootstrap_host: str = ""
    """Host of the bootstrap server; "" stands for the address at which the instance is reached."""
    bootstrap_port: int | None = None
    """Port of the bootstrap server, at which peers ask for KV; None for an instance that exchanges none."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Estimate of how fast one more request would decode here."""

    token_ms: float
    """Estimated time from one of its tokens to the next, with the prompts that are computed in between."""
    decode_ms: float
    """Estimated time from one of its tokens to the next, without prompts."""
    stream_ms: float
    """Additional time for each further request that comes with it."""
    budget_ms: float
    """Limit of that time (``--itl-budget-ms``); 0 without one."""
    max_tokens: int
    """Maximum length of a request, prompt and output."""


class Pong(Answer):
    """Scheduler → HTTP: whether the instance is able to serve."""

    ready: bool
    reason: str = ""
    """Why it is not ready (loading, draining, the worker is stuck). If it is ready: a problem to look after, or ""."""
    identity: Identity | None = None
    """None before the scheduler has started."""
    pace: Pace | None = None
    """None unless the instance lets a router choose where to decode (``--disaggregation-threshold auto``)."""


class Ping(Question[Pong]):
    """HTTP → scheduler: is the instance able to serve? Answered by ``Pong``."""


class FlushCacheResult(Answer):
    """Scheduler → HTTP: result of a ``FlushCacheReq``."""

    flushed: int
    """Dropped tokens."""


class FlushCacheReq(Question[FlushCacheResult]):
    """Drop every cached prefix that no request uses."""


class ServerInfo(Answer):
    """State of the scheduler, ready for JSON: pools, queues, role, peers, counters, invariants."""

    info: dict[str, Any]


class ServerInfoReq(Question[ServerInfo]):
    """HTTP → scheduler: describe your state. Answered by ``ServerInfo``."""


class Transfers(Answer):
    """Scheduler → HTTP: the open hand-overs of the instance."""

    open: int
    """Number of open hand-overs."""
    transfers: list[dict[str, Any]]
    """The oldest ``MAX_TRANSFERS`` of them, ready for JSON."""


class TransfersReq(Question[Transfers]):
    """HTTP → scheduler: list the open hand-overs. Answered by ``Transfers``."""


class Ready(Message):
    """Child → supervisor: process ``name`` can serve."""

    name: str
    info: dict[str, float] = {}
    """Seconds that start-up spent, by phase."""


class Drain(Message):
    """Supervisor → scheduler: admit no more requests, finish the running ones, then answer ``Drained``."""

    to: list[tuple[str, int]] = []
    """Bootstrap addresses of instances that running requests migrate to. Without any, they finish here."""


class StopAsked(Message):
    """HTTP → supervisor: drain the instance, as on SIGTERM, because an admin asked for it. ``to``: as in ``Drain``."""

    to: list[tuple[str, int]] = []


class RoleResult(Answer):
    """Scheduler → HTTP: result of a ``RoleReq``."""

    role: str
    """Role from now on."""
    before: str
    """Role before."""


class RoleReq(Question[RoleResult]):
    """HTTP → scheduler: change the role of this instance. Answered by ``RoleResult``."""

    role: Literal["unified", "prefill", "decode"]


class Drained(Message):
    """Scheduler → detokenizer → HTTP → supervisor: no request is left. It arrives after the last answers."""
