"""One connection to an HTTP/1 server: answers are parsed in the socket's callback, one request at a time.

    connecting → idle → (asked → head → body → idle)* → closed

A general client runs a stack of coroutines for each chunk. For a stream of tokens, that costs more than all other work.
Here a chunk costs one parser call and one call of the receiver. The receiver decides whether to wake a task.

HEAD is not supported, because its answers announce a body that never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, cast

import httptools

from .errors import BadAnswer, ClientError, ConnectionGone

MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of an answer's headers. Chunked framing and trailers between two pieces of a body count as well."""
MAX_HEADERS = 128

Headers = list[tuple[bytes, bytes]]


class ResponseReceiver(Protocol):
    """Takes an answer as it arrives. Called in the socket's callback: must neither wait nor raise."""

    def take_head(self, status: int, headers: Headers) -> None:
        """Take the head of the answer. Names are in lower case; values are unchanged, in any encoding."""

    def take_body(self, data: bytes) -> None:
        """Take a piece of the body."""

    def take_end(self, error: ClientError | None) -> None:
        """Take the end of the answer: it is complete if ``error`` is None, and has failed otherwise.

        This is the last call. It is not made after ``Connection.close``.
        """


class Connection(asyncio.Protocol):
    """A connection, usable once it is made."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._receiver: ResponseReceiver | None = None
        self._keeps = True
        self._paused = False
        self.epoch = b""
        """Epoch of the instance that has proven to be at the other end; "" if no proof was asked for."""

    @property
    def usable(self) -> bool:
        """Whether a request can be sent, or, while one is under way, whether another can follow."""
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    def ask(self, message: Iterable[bytes | memoryview], receiver: ResponseReceiver) -> None:
        """Send ``message``, a whole request, and let ``receiver`` take its answer.

        ``usable`` must hold, and no answer be awaited.
        """
        assert self._transport is not None
        assert self._receiver is None, "one request at a time"
        self._receiver = receiver
        self._status = 0
        self._headers: Headers = []
        self._head_bytes = 0
        self._framing_bytes = 0
        self._framed = self._complete = False
        self._untouched = True
        self._parser = httptools.HttpResponseParser(self)
        self._transport.writelines(message)

    def pause(self) -> None:
        """Read no more until ``resume``: the server is then held up, as it would be by a slow reader."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read from the server again after ``pause``."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Abort the connection and the answer that is under way; its receiver is not called any more."""
        self._keeps = False
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports have these methods without being subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            # An answer without a request must not become that of the next request.
            self.close()
            return
        self._untouched = False
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            if not self._complete:
                # What a callback raises comes wrapped.
                raised = e.__context__
                return self._fail(raised if isinstance(raised, BadAnswer) else BadAnswer(f"not HTTP: {e}"))
            self._keeps = False  # more came than was asked for
        if self._complete:
            self._finish()
        elif self._framing_bytes > MAX_HEAD_BYTES:
            self._fail(BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeps = False
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        # Where neither a length nor chunks were announced, the end of the connection is the body's.
        is_end = exc is None and self._status >= 200 and not self._framed
        receiver.take_end(None if is_end else ConnectionGone(self._untouched, exc))

    # the parser's side

    def on_message_begin(self) -> None:
        if self._complete:
            raise BadAnswer("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status >= 200:
            return  # a trailer
        name, value = name.lower(), value.strip(b" \t")
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self._headers) >= MAX_HEADERS:
            raise BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers")
        if name == b"content-length":
            self._framed = True
        elif name == b"transfer-encoding":
            self._framed = value.lower().endswith(b"chunked")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        self._status = self._parser.get_status_code()
        if not 100 <= self._status <= 599:
            raise BadAnswer(f"status {self._status}, which HTTP does not have")
        if self._status < 200:
            # Only an interim response (100 Continue, 103 Early Hints).
            self._headers.clear()
            self._head_bytes = 0
        elif self._receiver is not None:
            self._receiver.take_head(self._status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self._receiver is not None:
            self._receiver.take_body(body)

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._complete = True
            # Asked here, because the parser forgets it next.
            self._keeps = self._keeps and self._parser.should_keep_alive()

    def _finish(self) -> None:
        assert self._transport is not None
        # An answer that comes before all of its request was sent leaves the rest of that on the way.
        self._keeps = self._keeps and not self._transport.get_write_buffer_size()
        self.resume()
        receiver, self._receiver = self._receiver, None
        if not self.usable:
            self.close()
        if receiver is not None:
            receiver.take_end(None)

    def _fail(self, error: ClientError) -> None:
        receiver = self._receiver
        self.close()
        if receiver is not None:
            receiver.take_end(error)
