"""Reads a request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import Request


class BodyTooLarge(Exception):
    """The body is longer than ``limit`` bytes; what is left of it was not read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is longer than {limit} bytes")
        self.limit = limit


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes; raises ``BodyTooLarge`` before reading them all, ``ClientDisconnect``."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise BodyTooLarge(limit)
    return bytes(body)
