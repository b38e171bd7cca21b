"""Every HTTP request that a front answers: its id, its line in the access log, and how it is counted.

The id is the client's ``x-request-id`` where that is fit to be one, else drawn. It is in the answer's headers, whatever
the answer is, in the request's own headers for whoever passes them on, and on every log line of the task.

It costs a streamed event half a microsecond on its way out; the rest is a request's.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...messages.decode import shown
from ..logs import REQUEST_ID
from ..refusal_log import RefusalLog
from .paths import Access, PathFacts, PathTable
from .proxies import UNKNOWN, TrustedProxies

log = logging.getLogger("pdserve.access")

HEADER = b"x-request-id"
FIT_ID = re.compile(rb"[!-~]{1,128}")
"""Printable, no spaces, and short: it goes into headers, log lines and names of requests."""
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OTHER = "other"
"""In the place of paths and methods that strangers make up: each would be a time series of its own."""
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before it was answered."""
SCOPE_KEY = "pdserve.visit"


class AccessRecord:
    """One HTTP request. Times are ``time.monotonic()`` seconds, 0 for what has not happened.

    ``rid``: the engine's name of the request, where there is one. ``details``: what whoever serves it has to say in the
    access log, in order. ``has_own_id``: whether the client gave ``request_id``. ``client``: its address, as a log says
    it. ``facts``: of the path, None for one that does not exist. ``is_known``: whether the client may send requests;
    false until a key was found, where keys are asked for. ``headers``: more of the answer's.
    """

    def __init__(self, scope: Scope, client: str = UNKNOWN) -> None:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        self.has_own_id = FIT_ID.fullmatch(given) is not None
        self.request_id = given.decode("ascii") if self.has_own_id else secrets.token_hex(16)
        self.rid = ""
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self.client = client
        self.facts: PathFacts | None = None
        self.is_known = False
        self.started = time.monotonic()
        self.first_byte_at = 0.0
        self.status = 0
        self.streams = False
        self.sent_bytes = 0
        self.details: dict[str, Any] = {}
        self.headers: list[tuple[bytes, bytes]] = []

    @staticmethod
    def of(scope: Scope) -> AccessRecord:
        """The visit that is answered through ``scope``."""
        return cast(AccessRecord, scope[SCOPE_KEY])

    @property
    def label(self) -> str:
        """The path in metrics: one label for all that do not exist."""
        return self.facts.label if self.facts is not None else OTHER

    def name(self, rid: str) -> None:
        """The engine calls it ``rid``, and so does the log. It is the request's id too, where the client gave none."""
        self.rid = rid
        REQUEST_ID.set(rid)
        if not self.has_own_id and FIT_ID.fullmatch(rid.encode()):
            self.request_id = rid

    def on_send(self, message: Message) -> None:
        """A message of the answer leaves."""
        if message["type"] == "http.response.body":
            # A comment that keeps a stream alive is not yet its answer.
            if not self.first_byte_at and not message.get("body", b"").startswith(b":"):
                self.first_byte_at = time.monotonic()
            self.sent_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != HEADER]
            self.streams = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
            message["headers"] = [*headers, *self.headers, (HEADER, self.request_id.encode("ascii"))]


class AccessCounts:
    """``responses``: answers by method, path and status. ``in_flight``: requests that are not answered yet."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.in_flight = 0


class AccessLog:
    """ASGI middleware, the outermost: errors of any kind pass through it too.

    ``proxies``: those that are believed who their client is. ``on_end`` is told of each request, and how many seconds
    it took.
    """

    def __init__(
        self,
        app: ASGIApp,
        table: PathTable,
        counts: AccessCounts,
        *,
        access_log: bool,
        proxies: TrustedProxies | None = None,
        on_end: Callable[[AccessRecord, float], None] | None = None,
    ) -> None:
        self._app = app
        self._table = table
        self._proxies = proxies or TrustedProxies()
        self._counts = counts
        self._access_log = access_log
        self._on_end = on_end
        # Whoever may not be here must not be able to fill the log.
        self._refused = RefusalLog(log, "turned away", logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = scope[SCOPE_KEY] = AccessRecord(scope, self._proxies.client(scope))
        visit.facts = self._table.find(visit.path)
        others = [(name, value) for name, value in scope["headers"] if name != HEADER]
        scope["headers"] = [*others, (HEADER, visit.request_id.encode("ascii"))]

        # No coroutine of its own, which each event would pay for.
        def send_on(message: Message) -> Awaitable[None]:
            visit.on_send(message)
            return send(message)

        context = REQUEST_ID.set(visit.request_id)
        self._counts.in_flight += 1
        try:
            await self._app(scope, receive, send_on)
        finally:
            self._counts.in_flight -= 1
            self._ended(visit)
        # Not behind an error: its traceback is yet to be logged, by the server, in this same task.
        REQUEST_ID.reset(context)

    def _ended(self, visit: AccessRecord) -> None:
        visit.status = visit.status or CLIENT_GONE
        method = visit.method if visit.method in METHODS else OTHER
        self._counts.responses[method, visit.label, visit.status] += 1
        seconds = round(time.monotonic() - visit.started, 6)
        if self._on_end is not None:
            self._on_end(visit, seconds)
        if not self._access_log:
            return
        line = access_line(visit, seconds)
        if _may_be_a_stranger(visit):
            self._refused.add(line)
            return
        fields = {
            "client": visit.client,
            "method": shown(visit.method),
            "path": shown(visit.path),
            "status": visit.status,
            "seconds": seconds,
            "bytes": visit.sent_bytes,
            "request_id": visit.request_id,
            **visit.details,
        }
        level = logging.DEBUG if visit.facts is not None and visit.facts.is_poll else logging.INFO
        log.log(level, "%s", line, extra={"rid": visit.rid or visit.request_id, "fields": fields})


def access_line(visit: AccessRecord, seconds: float) -> str:
    """The text of a request in the access log, without what a line can't hold."""
    asked = f'{shown(visit.client)} "{shown(visit.method)} {shown(visit.path)}"'
    line = f"{asked} {visit.status} {seconds:.3f}s{_words(visit.details)}"
    if visit.rid not in ("", visit.request_id):
        line += f" x-request-id={visit.request_id}"
    return line


def _may_be_a_stranger(visit: AccessRecord) -> bool:
    """Whether the request failed without showing who sent it: such lines are limited, so that nobody fills the log."""
    if visit.status in (401, 403):
        return True
    is_open = visit.facts is not None and visit.facts.access is Access.OPEN
    return 400 <= visit.status < 500 and (is_open or not visit.is_known)


def _words(details: Mapping[str, Any]) -> str:
    return "".join(f" {name}={_word(value)}" for name, value in details.items() if value is not None)


def _word(value: Any) -> str:
    """Seconds as those of the line itself, never as 8.6e-05."""
    return f"{value:.3f}" if isinstance(value, float) else shown(str(value))
