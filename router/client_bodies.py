"""The bodies of clients' requests: how they are read, and how much of them the router holds at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.requests import Request

from ..runtime.web.apis import NATIVE
from ..runtime.web.aside import Aside
from ..runtime.web.body import MAX_UPLOADS, BodyEncoded, BodyTooLarge, TooManyValues, UploadDropped, Uploads
from ..runtime.web.paths import PathFacts
from .byte_budget import ByteBudget
from .errors import BodyEncodedError, BodyTooLargeError, TooManyBodiesError
from .request_body import RequestBody

SMALL_BYTES = 64 << 10
"""Maximum length of a small body. Small bodies have an eighth of the limit more, so that large ones cannot block them.
"""


LARGE_BYTES = 256 << 10
"""Maximum length of a body that is parsed on the event loop, which takes less than a millisecond."""


class ClientBodies:
    """Reader and parser of request bodies of up to ``limit`` bytes.

    A body is held until its request has ended, because an instance may hand the request on at any time. All held bodies
    together have at most ``held_limit`` bytes. An API key that holds a body may hold as many bytes as it leaves free.
    """

    def __init__(self, limit: int, held_limit: int) -> None:
        self.limit = limit
        """Maximum length of a body, in bytes."""
        self.budget = ByteBudget(held_limit)
        """Bytes of the bodies of running requests."""
        self._uploads = Uploads(MAX_UPLOADS * limit)
        self._aside = Aside()

    async def read(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises ``BodyEncodedError``, ``BodyTooLargeError``, ``TooManyBodiesError`` and ``ClientDisconnect``.
        """
        try:
            return await self._uploads.read(request, self.limit)
        except BodyEncoded as e:
            raise BodyEncodedError(str(e)) from None
        except BodyTooLarge as e:
            raise BodyTooLargeError(f"{e}, the most that --max-body-bytes allows") from None
        except TooManyValues as e:
            raise BodyTooLargeError(str(e)) from None
        except UploadDropped as e:
            raise TooManyBodiesError(str(e)) from None

    async def parse(self, raw: bytes, request_id: str = "", facts: PathFacts = NATIVE) -> RequestBody:
        """Parse a request's JSON body. One of more than ``LARGE_BYTES`` is parsed on a thread, one body at a time.

        Count it by ``hold`` before, because it may wait for other large ones. ``request_id`` becomes a part of the rid
        that is drawn if the body has none. ``facts``: those of the path it was sent to. Raises ``BadRequestError``.
        """
        parse = lambda: RequestBody.parse(raw, request_id, facts)  # noqa: E731
        return await self._aside.run(len(raw) > LARGE_BYTES, parse)

    @contextlib.contextmanager
    def hold(self, size: int, key: str) -> Iterator[None]:
        """Count a body of ``size`` bytes as held until the block ends. ``key`` is its API key's name, "" without one.

        Raises ``TooManyBodiesError`` if the bytes do not fit below the limit. A key that holds bodies already may not
        come to hold more than it leaves free. Bodies of up to ``SMALL_BYTES`` may exceed the limit by an eighth.
        """
        held = self.budget
        if not held.fits(size, key, extra=held.limit // 8 if size <= SMALL_BYTES else 0):
            share = f", {held.of(key)} of them this API key's, which may hold as many as it leaves free" if key else ""
            raise TooManyBodiesError(
                f"running requests hold {held.held} bytes of bodies{share}; the limit is {held.limit} "
                f"(--max-held-body-bytes); send this one again later"
            )
        held.add(size, key)
        try:
            yield
        finally:
            held.add(-size, key)
