"""One request for a response that is to be kept: watches its answer on the way to the client.

    begun: the first event has the response, with its id ─▶ items are added ─▶ ended: its last event has all of it

A response that is cancelled, or that its client leaves, is kept as "cancelled", with the items that were complete. One
that its instance failed to end is kept as "failed".

A whole answer is known only when it has ended. It cannot be cancelled by its id before.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..sse import EVENT_END

log = logging.getLogger(__name__)

EVENT = b"event: "
CREATED, DONE, ERROR = b"response.created", b"response.output_item.done", b"error"
LAST = (b"response.completed", b"response.incomplete", b"response.failed")
NUMBER = re.compile(rb'"sequence_number":([0-9]{1,9})[,}]')
CANCELLED, FAILED = "cancelled", "failed"
NO_ID = msgspec.Raw(b'""')
BROKE_OFF = {"code": "server_error", "message": "the answer broke off"}


class _Response(msgspec.Struct):
    """A response, or an event that has one or an item."""

    response: msgspec.Raw = msgspec.Raw(b"null")
    item: msgspec.Raw = msgspec.Raw(b"null")
    id: str = ""


class RunningResponse:
    """A running request.

    ``begin`` is called when its ``id`` is known, and ``keep`` with the JSON of the response when it has ended.
    """

    def __init__(
        self, begin: Callable[[RunningResponse], None], keep: Callable[[RunningResponse, bytes], None]
    ) -> None:
        self._begin = begin
        self._keep = keep
        self.id = ""
        """Id of the response; "" until it is known."""
        self._begun: dict[str, msgspec.Raw] = {}
        self._items: list[msgspec.Raw] = []
        self._number = 0
        """Number of the last event that was sent."""
        self._whole: list[bytes] = []
        self._is_good = self._is_stream = self._is_sent = self._is_over = self._has_failed = False
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False
        self.ended = asyncio.Event()
        """Set when the response has ended, and is kept."""

    def running(self) -> bytes:
        """Return the response so far, as JSON."""
        return self._written("in_progress")

    def cancel(self) -> None:
        """End the request by cancelling its task. Even a client that does not read can't hold it up.

        Do nothing if it has ended: only the client has to read the rest.
        """
        if self._task is not None and not self._is_cancelled and not self._is_over:
            self._is_cancelled = True
            self._task.cancel()

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request by ``app``, and keep the response that it sends, or what there is of it."""

        async def watched(message: Message) -> None:
            try:
                self._see(message)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                # The client can do with it what it likes.
                self._is_over = True
                log.warning("a response is not kept, since it can't be read: %s", e)
            await send(message)

        task = self._task = asyncio.current_task()
        assert task is not None
        try:
            await app(scope, receive, watched)
        except asyncio.CancelledError:
            # It may be the server that ends, too.
            if not self._is_cancelled or task.cancelling() > 1:
                raise
        finally:
            if self._is_cancelled:
                task.uncancel()
            if self.id and not self._is_over:
                # An answer that has ended without its last event broke off. One that its client left has no end.
                response = self._written(FAILED if self._has_failed or self._is_sent else CANCELLED)
                self._end(response)
                if self._is_cancelled and not self._is_sent:
                    await self._say_last(response, send)
            self.ended.set()

    def _see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_good = message["status"] == 200
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body" and self._is_good and not self._is_over:
            self._is_sent = not message.get("more_body", False)
            if self._is_stream:
                for event in message.get("body", b"").split(EVENT_END):
                    if event.startswith(EVENT):
                        self._see_event(event)
            else:
                self._whole.append(message.get("body", b""))
                if self._is_sent:
                    response = b"".join(self._whole)
                    self.id = msgspec.json.decode(response, type=_Response).id
                    self._end(response)

    def _see_event(self, event: bytes) -> None:
        kind, _, rest = event[len(EVENT) :].partition(b"\n")
        data = rest.partition(b" ")[2]
        if (number := NUMBER.search(data, max(0, len(data) - 64))) is not None:
            self._number = int(number[1])
        if kind == CREATED:
            response = msgspec.json.decode(data, type=_Response).response
            # Values stay JSON: instructions and tools may be as long as a body.
            self._begun = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
            self.id = msgspec.json.decode(self._begun.get("id", NO_ID), type=str)
            self._begin(self)
        elif kind == DONE:
            self._items.append(msgspec.json.decode(data, type=_Response).item)
        elif kind == ERROR:
            self._has_failed = True
        elif kind in LAST:
            self._end(bytes(msgspec.json.decode(data, type=_Response).response))

    def _written(self, status: str) -> bytes:
        error = {"error": BROKE_OFF} if status == FAILED else {}
        return msgspec.json.encode({**self._begun, **error, "status": status, "output": self._items})

    def _end(self, response: bytes) -> None:
        self._is_over = True
        self._keep(self, response)
        self.ended.set()

    async def _say_last(self, response: bytes, send: Send) -> None:
        """Send the client the end of a cancelled stream. It may have left."""
        number = self._number + 1
        event = {"type": LAST[1].decode(), "response": msgspec.Raw(response), "sequence_number": number}
        body = b"".join([EVENT, LAST[1], b"\ndata: ", msgspec.json.encode(event), EVENT_END])
        with suppress(OSError):
            await send({"type": "http.response.body", "body": body, "more_body": False})
