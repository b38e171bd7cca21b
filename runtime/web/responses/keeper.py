"""Keeps the responses of ``/v1/responses``, and answers requests for them, at an instance or a router alike.

The server that the client asks keeps a response: a router, if there is one. It also puts the conversation so far into
the input of the next request. So every pair and worker can serve that, and an instance that ends takes no response with
it. Two routers do not know each other's responses.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..access_log import error_shape
from ..aside import Aside
from ..errors import error_fields
from ..json_response import json_response
from ..keys import Caller, shown_key
from .request import Find, RequestRefused, ResponseRequest, read_request
from .response_files import ResponseFiles
from .response_store import KeptResponse, NoFiles, ResponseStore, StoreLimits
from .running_response import CANCELLED, RunningResponse

MB = 10**6
LARGE_BYTES = 256 << 10
"""Maximum length of a body that is read on the event loop, with the kept responses that it names."""
CANCEL_SECONDS = 5.0
"""Seconds for a cancelled response to end."""
ANSWERED_WHOLE = "a kept response is answered whole; leave it out"


class KeeperOptions(Protocol):
    """The options of a server about responses that it keeps."""

    @property
    def responses_dir(self) -> str | None: ...
    @property
    def responses_size(self) -> float: ...
    @property
    def responses_quota(self) -> float: ...


def open_responses(options: KeeperOptions, *, is_router: bool) -> ResponseKeeper:
    """Make the keeper that ``options`` ask for. Raises ``ResponseFolderError``."""
    folder = options.responses_dir
    files = NoFiles() if folder is None else ResponseFiles(Path(folder).expanduser())
    limits = StoreLimits(int(options.responses_size * MB), int(options.responses_quota * MB))
    return ResponseKeeper(ResponseStore(limits, files), is_router=is_router)


def owner_of(scope: Scope) -> str:
    """Return the owner of a client's responses: the name of its key.

    A server that checks no keys takes a digest of what the client shows, as its instances may check it.
    """
    caller = Caller.of(scope)
    if caller.name:
        return caller.name
    key = shown_key(scope["headers"])
    return f"unchecked-{sha256(key).hexdigest()[:32]}" if key else ""


class ResponseKeeper:
    """The responses that this server keeps, and those that are running."""

    def __init__(self, store: ResponseStore, *, is_router: bool) -> None:
        self._store = store
        self._is_router = is_router
        self._aside = Aside()
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def close(self) -> None:
        """Wait until all responses are written to files."""
        self._store.close()

    async def read(self, scope: Scope, raw: bytes, limit: int) -> ResponseRequest:
        """Read the body of ``POST /v1/responses``, and put the conversation so far into its input.

        ``limit``: maximum length of the body with it. Raises ``RequestRefused`` if it is longer, or if it names a
        response that is not kept for this client. If there is no room for its input beside those of running
        requests, the response is not kept, and says so by its ``store``.
        """
        owner = owner_of(scope)

        def find(response_id: str) -> KeptResponse | None:
            return self._store.get(owner, response_id)

        def read(find: Find) -> ResponseRequest:
            return read_request(raw, find, limit, keeps=self._store.keeps, is_first=self._is_router)

        try:
            if len(raw) > LARGE_BYTES:
                raise _Large
            request = read(_small(find, LARGE_BYTES - len(raw)))
        except _Large:
            request = await self._aside.run(True, lambda: read(find))
        if request.keeps and not self._store.has_room(owner, len(request.items)):
            return request.unkept()
        return request

    async def answer(self, request: ResponseRequest, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by ``app``, and keep the response if it is to be kept.

        ``receive`` gives the body if ``app`` reads it. Leave out that of ``request``, which is held all the time.
        """
        if not request.keeps:
            await app(scope, receive, send)
            return
        owner = owner_of(scope)

        def begin(running: RunningResponse) -> None:
            self._running[(owner, running.id)] = running

        def keep(running: RunningResponse, response: bytes) -> None:
            self._running.pop((owner, running.id), None)
            self._store.put(KeptResponse(owner, running.id, response, request.items))

        running = RunningResponse(begin, keep)
        try:
            with self._store.hold(owner, len(request.items)):
                await running.run(app, scope, receive, send)
        finally:
            self._running.pop((owner, running.id), None)

    async def get(self, request: Request) -> Response:
        """GET /v1/responses/{id}: a kept response, or a running one as it is by now."""
        if request.query_params.get("stream", "false") != "false":
            return refusal(request.scope, 400, f"stream: {ANSWERED_WHOLE}", "stream")
        key = (owner_of(request.scope), request.path_params["id"])
        if (running := self._running.get(key)) is not None:
            return _json(running.running())
        kept = self._store.get(*key)
        return _json(kept.response) if kept is not None else _not_found(request)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}: drop a kept response. A running one is refused, as it would be kept at its end."""
        owner, response_id = owner_of(request.scope), request.path_params["id"]
        if (owner, response_id) in self._running:
            return refusal(
                request.scope, 400, f"the response is running; POST /v1/responses/{response_id}/cancel ends it"
            )
        if not self._store.delete(owner, response_id):
            return _not_found(request)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: end a running response, which is then kept as it is."""
        key = (owner_of(request.scope), request.path_params["id"])
        if (running := self._running.get(key)) is not None:
            running.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await running.ended.wait()
        kept = self._store.get(*key)
        if kept is None:
            return _not_found(request)
        status = msgspec.json.decode(kept.response, type=_Status).status
        if status != CANCELLED:
            return refusal(request.scope, 400, f"the response has ended before: its status is {status}")
        return _json(kept.response)


class _Large(Exception):
    """A request names more bytes of kept responses than are read on the event loop."""


def _small(find: Find, most: int) -> Find:
    """Return ``find`` for responses of at most ``most`` bytes together. It raises ``_Large`` beyond."""
    left = most

    def within(response_id: str) -> KeptResponse | None:
        nonlocal left
        kept = find(response_id)
        left -= kept.nbytes if kept is not None else 0
        if left < 0:
            raise _Large
        return kept

    return within


class _Status(msgspec.Struct):
    """The part of a response that says how it ended."""

    status: str = ""


def refusal(scope: Scope, status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """Make the response for a refused request, in the error shape of its path."""
    body = orjson.dumps(error_shape(scope)(error_fields(status, message, param=param, code=code)))
    return Response(body, status, media_type="application/json")


def refused(scope: Scope, error: RequestRefused) -> Response:
    """Make the response for a request that can't be passed on."""
    return refusal(scope, error.status, f"{error.param}: {error}", error.param, error.code)


def _not_found(request: Request) -> Response:
    response_id = request.path_params["id"][:128]
    message = (
        f"response {response_id!r} is not kept here; it was dropped or deleted, had store: false, was too large "
        "(--responses-quota), belongs to another key, or another server keeps it"
    )
    return refusal(request.scope, 404, message, "id")


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
