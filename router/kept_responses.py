"""``POST /v1/responses`` at a router, which keeps responses and puts the conversation so far into the input."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runtime.web.keys import Caller
from ..runtime.web.responses.keeper import ResponseKeeper, refused
from ..runtime.web.responses.request import RequestRefused
from .client_bodies import ClientBodies


class ResponsesEndpoint:
    """An ASGI endpoint in front of ``generation``, the endpoint that sends requests to a pair or a worker."""

    def __init__(self, generation: ASGIApp, keeper: ResponseKeeper, bodies: ClientBodies) -> None:
        self._generation = generation
        self._keeper = keeper
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await self._bodies.read(Request(scope, receive))
        try:
            with self._bodies.hold(len(raw), Caller.of(scope).name):
                request = await self._keeper.read(scope, raw, self._bodies.limit)
        except RequestRefused as e:
            await refused(scope, e)(scope, receive, send)
            return
        del raw
        again = replayed(request.body, receive)
        request = request._replace(body=b"")
        await self._keeper.answer(request, self._generation, scope, again, send)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a request's ``body`` first, which was read before, and then what comes."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return parts.pop() if parts else await receive()

    return receive_again
