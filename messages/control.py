"""Questions about the instance itself, and the supervisor's messages.

A question rides the same ring as requests, HTTP → tokenizer → scheduler → detokenizer → HTTP, so its answer proves
that every process on the ring is alive.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .base import Message

MAX_TRANSFERS = 1000


class Ping(Message):
    """Is the instance able to serve? ``sent`` is ``time.monotonic()``."""

    id: int


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which instance this is, for who sends it work. ``role``: its current one.

    ``bootstrap_port``: where its KV is asked for, None where it exchanges none; on ``bootstrap_host``, or where that is
    "" at the address that the instance is reached at.
    """

    epoch: str
    role: str
    bootstrap_host: str = ""
    bootstrap_port: int | None = None


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast one more request would decode here: ``token_ms`` from one of its tokens to the next, as far as it can be
    foreseen, prompts that are computed here between them included, ``decode_ms`` without those, and ``stream_ms`` more
    for each that comes with it. ``budget_ms``: what is promised for that time, 0 where nothing is. ``max_tokens``: how
    long it may become at most.
    """

    token_ms: float
    decode_ms: float
    stream_ms: float
    budget_ms: float
    max_tokens: int


class Pong(Message):
    """``ready`` False comes with the reason (loading, draining, the worker is stuck), True with what somebody should
    look after, if there is anything. ``identity``: None before the scheduler has begun. ``pace``: None where requests
    shall stay where their sender put them.
    """

    id: int
    ready: bool
    reason: str = ""
    identity: Identity | None = None
    pace: Pace | None = None


class FlushCacheReq(Message):
    """Drop every cached prefix that no request uses."""

    id: int


class FlushCacheResult(Message):
    """``flushed`` tokens were dropped; ``success`` False (with the reason) while requests are running."""

    id: int
    success: bool
    flushed: int = 0
    message: str = ""


class ServerInfoReq(Message):
    """What does the scheduler hold?"""

    id: int


class ServerInfo(Message):
    """The scheduler's view, JSON-ready: pools, queues, role, peers, counters, invariants."""

    id: int
    info: dict[str, Any]


class TransfersReq(Message):
    """Which hand-overs are open?"""

    id: int


class Transfers(Message):
    """Those of the instance, JSON-ready; the oldest ``MAX_TRANSFERS``, and how many there are."""

    id: int
    open: int
    transfers: list[dict[str, Any]]


class Ready(Message):
    """Child → supervisor: process ``name`` can serve; ``info`` says what start-up spent where (seconds)."""

    name: str
    info: dict[str, float] = {}


class Drain(Message):
    """Supervisor → scheduler: admit nothing more, finish what runs, then answer ``Drained``.

    ``to``: bootstrap addresses of instances that shall go on with it; without any, it is finished here.
    """

    to: list[tuple[str, int]] = []


class StopAsked(Message):
    """HTTP → supervisor: an admin wants the instance drained, as by SIGTERM. ``to``: as in ``Drain``."""

    to: list[tuple[str, int]] = []


class RoleReq(Message):
    """HTTP → scheduler: what this instance is to be offered from now on."""

    id: int
    role: Literal["unified", "prefill", "decode"]


class RoleResult(Message):
    """The role from now on, and the one before; ``message`` where it can't be changed."""

    id: int
    role: str
    before: str
    message: str = ""


class Drained(Message):
    """No request is left. Scheduler → detokenizer → HTTP → supervisor: it arrives behind the last answers."""
