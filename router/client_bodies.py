"""The bodies of clients' requests, as the router reads them."""

from __future__ import annotations

from starlette.requests import Request

from ..runtime.web.body import BodyTooLarge, TooManyValues, UploadDropped, Uploads
from .errors import BodyTooLargeError, TooManyUploadsError

MAX_UPLOADS = 8
"""Bodies of the full length that may be arriving at once."""


class ClientBodies:
    """Reads bodies of up to ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._uploads = Uploads(MAX_UPLOADS * limit)

    async def read(self, request: Request) -> bytes:
        """Raises ``BodyTooLargeError``, ``TooManyUploadsError``, ``ClientDisconnect``."""
        try:
            return await self._uploads.read(request, self._limit)
        except BodyTooLarge as e:
            raise BodyTooLargeError(f"{e}, the most that --max-body-bytes allows") from None
        except TooManyValues as e:
            raise BodyTooLargeError(str(e)) from None
        except UploadDropped as e:
            raise TooManyUploadsError(str(e)) from None
