"""One request to one instance.

    created ──open()──▶ answered 2xx ──events() | read_all()──▶ done
       └────────┴── any failure raises ──┴── close() drops the connection, which aborts the request there

An answer's bytes are handed on as they came: nothing is decompressed, and SSE events are not parsed, only kept whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import httpx

from .errors import InstanceAnsweredError, InstanceGoneError, InstanceSilentError
from .fleet import Fleet
from .instance import Instance

EVENT_END = b"\n\n"


class LegLimits(NamedTuple):
    """Seconds that an instance may be silent: before its answer begins, and in the middle of it."""

    first_byte: float
    idle: float


class Leg:
    """A request to ``instance``. A context manager: leaving it closes the connection unless the answer is complete."""

    def __init__(self, client: httpx.AsyncClient, fleet: Fleet, instance: Instance, limits: LegLimits) -> None:
        self.instance = instance
        self._client = client
        self._fleet = fleet
        self._limits = limits
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        self.instance.in_flight += 1
        self.instance.requests += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.instance.in_flight -= 1
        if self._response is not None:
            await self._response.aclose()

    async def open(self, method: str, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> httpx.Response:
        """Send the request and wait for the answer's head.

        Raises ``InstanceGoneError``, ``InstanceSilentError``, or ``InstanceAnsweredError`` for any status but 2xx.
        """
        request = self._client.build_request(method, self.instance.url + path, content=body, headers=headers)
        try:
            async with asyncio.timeout(self._limits.first_byte):
                self._response = await self._client.send(request, stream=True)
        except TimeoutError:
            raise self._silent(self._limits.first_byte, "did not begin to answer") from None
        except httpx.TransportError as exc:
            raise self._gone("before it answered", exc) from exc
        self._chunks = self._response.aiter_raw()
        if not self._response.is_success:
            answer = await self.read_all()
            retry_after = self._response.headers.get("retry-after")
            raise InstanceAnsweredError(self._response.status_code, answer, str(self.instance), retry_after)
        return self._response

    async def read_all(self) -> bytes:
        """The whole answer. Raises ``InstanceGoneError`` or ``InstanceSilentError``."""
        parts = []
        while chunk := await self._next_chunk():
            parts.append(chunk)
        return b"".join(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """Runs of whole SSE events as they come: an answer that breaks off never leaves half an event behind.

        Raises ``InstanceGoneError`` or ``InstanceSilentError``.
        """
        pending = b""
        while chunk := await self._next_chunk():
            # Nearly always true: an instance writes whole events.
            if not pending and chunk.endswith(EVENT_END):
                yield chunk
                continue
            pending += chunk
            whole, end, pending = pending.rpartition(EVENT_END)
            if end:
                yield whole + end
        if pending:
            yield pending + EVENT_END

    async def _next_chunk(self) -> bytes:
        """The next bytes of the answer, b"" at its end."""
        assert self._chunks is not None, "open() comes first"
        try:
            async with asyncio.timeout(self._limits.idle):
                return await anext(self._chunks, b"")
        except TimeoutError:
            raise self._silent(self._limits.idle, "went silent in the middle of its answer") from None
        except httpx.TransportError as exc:
            raise self._gone("in the middle of its answer", exc) from exc

    def _gone(self, when: str, cause: Exception) -> InstanceGoneError:
        if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
            message = f"{self.instance} can't be reached"
        else:
            message = f"{self.instance} closed the connection {when}"
        self._fleet.report_failure(self.instance, f"{message} ({type(cause).__name__}: {cause})")
        return InstanceGoneError(message)

    def _silent(self, seconds: float, what: str) -> InstanceSilentError:
        message = f"{self.instance} {what} within {seconds:g} s"
        self._fleet.report_failure(self.instance, message)
        return InstanceSilentError(message)
