"""The answer to one client, written straight to ASGI: a chunk passes through with no response object in between."""

from __future__ import annotations

import logging

import orjson
from starlette.types import Send

from ..runtime.web.errors import ErrorShape, plain_error
from ..runtime.web.sse import OPENAI_STREAM, StreamFormat
from .errors import RouterError
from .headers import JSON_TYPE, Headers

logger = logging.getLogger(__name__)

READY = b'{"status":"ready"}'


class ClientAnswer:
    """The answer to one client.

    Comments keep a stream alive before its answer has started. Its head is sent then, but any instance may still give
    the answer.
    """

    def __init__(
        self, send: Send, error_shape: ErrorShape = plain_error, stream_format: StreamFormat = OPENAI_STREAM
    ) -> None:
        self._send = send
        self._error_shape = error_shape
        self.stream_format = stream_format
        """Format of the answer if it is a stream."""
        self.started = False
        """True from just before the first byte of an answer is sent. From then on there is no retry."""
        self.finished = False
        """True from just before the last byte is sent."""
        self.is_in_event = False
        """Whether the part of a stream that was sent last ends within an event."""
        self.sent_error = False
        """Whether an error event was passed on after the answer had started."""
        self._opened = False
        self._is_whole = False

    async def start(self, status: int, headers: Headers) -> None:
        """Set ``started``, and send the answer's head unless ``keep_alive`` has sent one before."""
        self.started = True
        await self._open(status, headers)

    async def keep_alive(self, status: int, headers: Headers, event: bytes) -> None:
        """Send an event without meaning, and before it a stream's head if none has been sent yet.

        ``started`` stays as it is.
        """
        await self._open(status, headers)
        await self.write(event)

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def flush(self) -> None:
        """Wait until the client's connection has taken nearly all that was sent. The server holds no more of it then.

        An empty part of the body waits like any other, and is not sent.
        """
        await self.write(b"")

    async def finish(self, last: bytes = b"") -> None:
        """Send ``last`` as the last bytes of the body, and end the answer."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _open(self, status: int, headers: Headers) -> None:
        if not self._opened:
            self._opened = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def start_whole(self, status: int, headers: Headers) -> None:
        """Begin an answer that does not stream and comes in parts.

        If ``fail`` ends it, its connection is closed without the rest.
        """
        self._is_whole = True
        await self.start(status, headers)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer: its head with a ``content-length``, and its body."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def fail(self, error: RouterError) -> None:
        """Send an error, and end the answer with it.

        If no head has been sent yet, the answer has the error's status and headers. Otherwise a stream ends with the
        error as an event, and with the last event of the API's streams. An answer that does not stream stays
        incomplete, so the server closes its connection. So does a stream within an event, which no error can follow.
        """
        if self._is_whole or self.is_in_event:
            logger.warning("an answer ends before its last part: %s", error.message)
            return
        body = orjson.dumps(self._error_shape(error.fields()))
        if self._opened:
            await self.finish(self.stream_format.end_with_error(body))
            return
        await self.whole(error.status, [JSON_TYPE, *error.all_headers()], body)


class ReadyAnswer(ClientAnswer):
    """The answer to a health check that generates a token: the state, not the text."""

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send ``READY`` in place of a successful answer (2xx). Send any other answer as it is."""
        if 200 <= status < 300:
            headers, body = [JSON_TYPE], READY
        await super().whole(status, headers, body)
