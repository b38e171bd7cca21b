"""Reads requests' bodies: each up to a limit, and all that are under way up to another."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from ...messages.decode import shown
from ..malloc import trim

MAX_PROMPTS = 4096
"""Prompts in one body, and entries of the lists that go with them."""
MAX_UPLOADS = 8
"""Maximum number of bodies of the full length that may be arriving at once."""
MAX_VALUES = 2**22
"""Maximum number of JSON values in one body, counted by its commas.

Parsing this many numbers takes 0.1 s and 64 MiB. A body of 32 MiB could have four times as many.
"""
MAX_CONTAINERS = 2**16
"""Maximum number of lists and objects in one body. They take a parser ten times as long as numbers. Prompts, messages
and their parts need fewer.
"""
MAX_STRINGS = 2**18
"""Maximum number of strings in one body, counted by their quotes, field names included.

Parsing an object of a million fields takes half a second.
"""


TRIM_BYTES = 16 << 20
"""Bytes of bodies that have gone, after which the heap is trimmed: some milliseconds. It gives back only its end by
itself, and one small block that came late keeps all the pieces of bodies below it."""
STEP = 1 << 20
"""Bytes that are counted in one turn of the event loop: some 2 ms."""


class BodyTooLarge(Exception):
    """The body is longer than ``limit`` bytes; what is left of it was not read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes")
        self.limit = limit


class TooManyValues(Exception):
    """The body would be too much for a parser, whatever its length."""

    def __init__(self, values: int) -> None:
        text = f"the body holds more than {values} values, {MAX_CONTAINERS} lists and objects, or {MAX_STRINGS} strings"
        super().__init__(f"{text}; send fewer prompts at a time")


class BodyEncoded(Exception):
    """The body is compressed, and nothing here unpacks it: a short one could hold terabytes."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"a body with content-encoding {shown(encoding)!r} is not unpacked here; send it as it is")


class UploadDropped(Exception):
    """Too much was arriving at once, and this was the largest body that was not complete."""


class Uploads:
    """The bodies that a server is reading. Incomplete ones have at most ``limit`` bytes together.

    If they exceed the limit, the largest one is ended. So idle uploads do not lock out clients with small bodies.
    ``values`` is the maximum number of commas in one body.
    """

    def __init__(self, limit: int, values: int = MAX_VALUES) -> None:
        self._limit = limit
        self._values = values
        self._sizes: dict[asyncio.Timeout, int] = {}
        self.held = 0
        """Bytes of bodies that are not complete."""
        self._untrimmed = 0
        """Bytes of bodies that have gone since the heap was trimmed."""
        self.waiting = 0
        """Bytes of complete bodies that wait for a parser."""

    async def read(self, request: Request, limit: int) -> bytes:
        """Read a request's body of JSON, of at most ``limit`` bytes.

        Raises ``BodyEncoded`` or ``BodyTooLarge`` before all of it is read, and ``TooManyValues`` and
        ``ClientDisconnect``. Raises ``UploadDropped`` if all bodies that are arriving exceed the limit together, and
        this one is the largest.
        """
        try:
            async with asyncio.timeout(None) as upload:
                body = await read_body(request, limit, lambda size: self._grow(upload, size))
        except TimeoutError:
            raise UploadDropped("too many large bodies are arriving at once; send this one again later") from None
        finally:
            self._gone(self._sizes.pop(upload, 0))
        body = body.removeprefix(codecs.BOM_UTF8)  # Windows' editors begin files with it
        await self.check(body)
        return body

    async def check(self, body: bytes) -> None:
        """Check what a complete body holds. Raises ``TooManyValues`` if it would be too much for a parser."""
        # No parser can be interrupted, so all streams would wait for it. Counting takes a tenth of the time, or less.
        if len(body) > MAX_CONTAINERS and await _has_too_many(body, self._values):
            raise TooManyValues(self._values)

    @contextmanager
    def wait(self, size: int) -> Iterator[None]:
        """Count a complete body of ``size`` bytes while it waits for a parser, and is parsed.

        Raises ``UploadDropped`` if those that wait would be more than the limit.
        """
        if self.waiting and self.waiting + size > self._limit:
            raise UploadDropped("too many large bodies wait to be parsed; send this one again later")
        self.waiting += size
        try:
            yield
        finally:
            self.waiting -= size

    def _gone(self, size: int) -> None:
        self.held -= size
        self._untrimmed += size
        if self._untrimmed >= TRIM_BYTES:
            self._untrimmed = 0
            asyncio.get_running_loop().call_soon(trim)  # once the reader of the body has released it

    def _grow(self, upload: asyncio.Timeout, size: int) -> None:
        self.held += size
        self._sizes[upload] = self._sizes.get(upload, 0) + size
        if self.held <= self._limit:
            return
        # Uploads that are being ended hold their bytes a little longer, and are not ended twice.
        ended = sum(held for other, held in self._sizes.items() if other.when() is not None)
        if self.held - ended > self._limit:
            largest = max((u for u in self._sizes if u.when() is None), key=self._sizes.__getitem__)
            largest.reschedule(asyncio.get_running_loop().time())


async def _has_too_many(body: bytes, values: int) -> bool:
    commas = quotes = brackets = 0
    for start in range(0, len(body), STEP):
        end = start + STEP
        commas += body.count(b",", start, end)
        quotes += body.count(b'"', start, end) - body.count(b'\\"', start, end + 1)
        brackets += body.count(b"[", start, end) + body.count(b"{", start, end)
        if commas > values or quotes > 2 * MAX_STRINGS:
            return True
        if end < len(body):
            await asyncio.sleep(0)
    return brackets > MAX_CONTAINERS and await _has_too_many_containers(body)


async def _has_too_many_containers(body: bytes) -> bool:
    """Return whether there are more than ``MAX_CONTAINERS`` lists and objects. Brackets in strings do not count."""
    containers = start = within = 0
    while start < len(body):
        end = start + STEP
        part = body[start:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # no escape is cut
            end += 1
            part = body[start:end]
        # Without escapes, every second piece between quotes is a string.
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        containers += sum(piece.count(b"[") + piece.count(b"{") for piece in pieces[within::2])
        if containers > MAX_CONTAINERS:
            return True
        within ^= (len(pieces) - 1) & 1
        start = end
        await asyncio.sleep(0)
    return False


async def read_body(request: Request, limit: int, on_part: Callable[[int], None] | None = None) -> bytes:
    """Read a request's body of at most ``limit`` bytes.

    ``on_part`` is called with the length of each part as it arrives. Raises ``BodyEncoded`` and ``BodyTooLarge`` before
    reading all of it, and ``ClientDisconnect``.
    """
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise BodyEncoded(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise BodyTooLarge(limit)
        if on_part is not None:
            on_part(len(part))
    return bytes(body)
