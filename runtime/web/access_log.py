"""The id of each HTTP request, its line in the access log, and its counters.

The id is the client's ``x-request-id`` if it is valid, or else drawn. It is in the headers of every answer, and on
every log line of the task. It is also in the request's own headers, for servers that pass them on.

A streamed event costs half a microsecond here. All other costs occur once per request.
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
from ...messages.metrics import Labelled
from ..logs import REQUEST_ID
from ..refusal_log import RefusalLog
from .errors import ErrorShape, message_error, plain_error
from .paths import Access, AtRouter, PathFacts, PathTable
from .proxies import UNKNOWN, TrustedProxies
from .sse import OPENAI_STREAM, StreamFormat

log = logging.getLogger("pdserve.access")

HEADER = b"x-request-id"
FIT_ID = re.compile(rb"[!-~]{1,128}")
"""Printable, no spaces, and short: it goes into headers, log lines and names of requests."""
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OTHER = "other"
"""Label in place of paths and methods that clients make up: each would be a time series of its own."""
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before it was answered."""
OLLAMA_PREFIX = "/api/"
"""Beginning of the paths of Ollama's API."""
SCOPE_KEY = "pdserve.access_record"


def undeclared(path: str) -> PathFacts:
    """Return the facts about a ``path`` that does not exist. Its errors have the usual shape.

    Clients of Ollama also use paths of its API that do not exist here.
    """
    shape = message_error if path.startswith(OLLAMA_PREFIX) else plain_error
    return PathFacts(OTHER, (), "", "", AtRouter.NOT_FOUND, error_shape=shape)


class AccessRecord:
    """One HTTP request. Times are ``time.monotonic()`` seconds, 0 for events that have not happened."""

    def __init__(self, scope: Scope, client: str = UNKNOWN) -> None:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        self.has_own_id = FIT_ID.fullmatch(given) is not None
        """Whether the client gave ``request_id``."""
        self.request_id = given.decode("ascii") if self.has_own_id else secrets.token_hex(16)
        self.rid = ""
        """The engine's name of the request; "" if it has none."""
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self.client = client
        """Address of the client, as in the log."""
        self.facts = undeclared(self.path)
        """Facts about the path."""
        self.is_known = False
        """Whether the client may send requests. If keys are asked for, it is False until a key was found."""
        self.started = time.monotonic()
        self.first_byte_at = 0.0
        self.status = 0
        self.streams = False
        self.sent_bytes = 0
        self.details: dict[str, Any] = {}
        """Additions to the access log by the code that serves the request, in order."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Additional headers of the answer."""

    @staticmethod
    def of(scope: Scope) -> AccessRecord:
        """Return the record of the request that is answered through ``scope``."""
        return cast(AccessRecord, scope[SCOPE_KEY])

    @property
    def rid_prefix(self) -> str:
        """Prefix of the id that the engine's request gets if the client names none."""
        return self.facts.rid_prefix

    @property
    def stream_format(self) -> StreamFormat:
        """Format of the path's streams."""
        return self.facts.stream_format

    @property
    def id_headers(self) -> tuple[bytes, ...]:
        """Headers of the answer, beside the usual one, that have the request's id."""
        return self.facts.id_headers

    @property
    def label(self) -> str:
        """Label of the path in metrics; ``OTHER`` for all paths that do not exist."""
        return self.facts.label

    def name(self, rid: str) -> None:
        """Set ``rid``, the engine's name of the request, for the log.

        It becomes the request's id if the client gave none.
        """
        self.rid = rid
        REQUEST_ID.set(rid)
        if not self.has_own_id and FIT_ID.fullmatch(rid.encode()):
            self.request_id = rid

    def on_send(self, message: Message) -> None:
        """Note status, first byte and size of the answer from an ASGI message, and add headers to the answer's head.

        The headers are the request's id and those in ``headers``. The message is changed in place.
        """
        if message["type"] == "http.response.body":
            # An event that keeps a stream alive is not yet its answer.
            if not self.first_byte_at and not self.stream_format.is_keep_alive(message.get("body", b"")):
                self.first_byte_at = time.monotonic()
            self.sent_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != HEADER]
            streamed = self.stream_format.media_type
            self.streams = any(name == b"content-type" and value.startswith(streamed) for name, value in headers)
            own = self.request_id.encode("ascii")
            message["headers"] = [*headers, *self.headers, *((name, own) for name in (HEADER, *self.id_headers))]


def error_shape(scope: Scope) -> ErrorShape:
    """Return the shape of errors at the path of ``scope``."""
    record: AccessRecord | None = scope.get(SCOPE_KEY)
    return record.facts.error_shape if record is not None else undeclared(scope["path"]).error_shape


def stream_format(scope: Scope) -> StreamFormat:
    """Return the format of streams at the path of ``scope``: the usual one if the path does not exist."""
    record: AccessRecord | None = scope.get(SCOPE_KEY)
    return record.stream_format if record is not None else OPENAI_STREAM


class AccessCounts:
    """``responses``: answers by method, path and status. ``in_flight``: requests that are not answered yet."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.in_flight = 0

    def by_labels(self) -> Labelled:
        """Return the numbers of answers by the values of the labels ``method``, ``path`` and ``status``."""
        return {(method, path, str(status)): count for (method, path, status), count in self.responses.items()}


class AccessLog:
    """The outermost ASGI middleware: errors of any kind pass through it, too.

    ``proxies`` are trusted to name their clients. ``on_end`` is called for each request with the seconds that it took.
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
        # Refused clients must not be able to fill the log.
        self._refused = RefusalLog(log, "turned away", logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[SCOPE_KEY] = AccessRecord(scope, self._proxies.client(scope))
        record.facts = self._table.find(record.path, record.method) or record.facts
        others = [(name, value) for name, value in scope["headers"] if name != HEADER]
        scope["headers"] = [*others, (HEADER, record.request_id.encode("ascii"))]

        # No coroutine of its own, which each event would pay for.
        def send_on(message: Message) -> Awaitable[None]:
            record.on_send(message)
            return send(message)

        context = REQUEST_ID.set(record.request_id)
        self._counts.in_flight += 1
        try:
            await self._app(scope, receive, send_on)
        finally:
            self._counts.in_flight -= 1
            self._ended(record)
        # Not behind an error: its traceback is yet to be logged, by the server, in this same task.
        REQUEST_ID.reset(context)

    def _ended(self, record: AccessRecord) -> None:
        record.status = record.status or CLIENT_GONE
        method = record.method if record.method in METHODS else OTHER
        self._counts.responses[method, record.label, record.status] += 1
        seconds = round(time.monotonic() - record.started, 6)
        if self._on_end is not None:
            self._on_end(record, seconds)
        if not self._access_log:
            return
        line = access_line(record, seconds)
        if _may_be_a_stranger(record):
            self._refused.add(line)
            return
        fields = {
            "client": record.client,
            "method": shown(record.method),
            "path": shown(record.path),
            "status": record.status,
            "seconds": seconds,
            "bytes": record.sent_bytes,
            "request_id": record.request_id,
            **record.details,
        }
        level = logging.DEBUG if record.facts.is_poll else logging.INFO
        log.log(level, "%s", line, extra={"rid": record.rid or record.request_id, "fields": fields})


def access_line(record: AccessRecord, seconds: float) -> str:
    """Make the line of a request that took ``seconds`` for the access log. Unprintable characters are replaced."""
    asked = f'{shown(record.client)} "{shown(record.method)} {shown(record.path)}"'
    line = f"{asked} {record.status} {seconds:.3f}s{_words(record.details)}"
    if record.rid not in ("", record.request_id):
        line += f" x-request-id={record.request_id}"
    return line


def _may_be_a_stranger(record: AccessRecord) -> bool:
    """Return whether a client needs no key to have this request's line written. Such lines are limited.

    That holds for every 401 and 403, for ``OPTIONS``, for errors of open paths, and for other 4xx where no key was
    found.
    """
    if record.status in (401, 403) or record.method == "OPTIONS":
        return True
    if record.facts.access is Access.OPEN:
        return record.status >= 400
    return 400 <= record.status < 500 and not record.is_known


def _words(details: Mapping[str, Any]) -> str:
    return "".join(f" {name}={_word(value)}" for name, value in details.items() if value is not None)


def _word(value: Any) -> str:
    """Format a value. Seconds look like those of the line itself, never like 8.6e-05."""
    return f"{value:.3f}" if isinstance(value, float) else shown(str(value))
