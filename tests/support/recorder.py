"""Stands between clients and a server, and keeps what they send: one body of each shape."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .processes import free_ports, wait_until

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
LONGEST = 20_000
"""Bytes of a body that is worth keeping; longer ones are about their length."""
HOPS = ("connection", "content-length", "host", "transfer-encoding")


def shape(value: Any) -> Any:
    """Return the structure of a JSON value: names and types, whatever the order and the number of entries."""
    if isinstance(value, dict):
        return tuple(sorted((name, shape(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return tuple(sorted({repr(shape(inner)) for inner in value}))
    return type(value).__name__


class Recorder:
    """A proxy that passes everything on to ``target``, and its answers back. ``client``: set the sender's name before
    it sends.
    """

    def __init__(self, target: str) -> None:
        self.client = ""
        self._bodies: dict[str, dict[Any, dict[str, Any]]] = {}
        self._upstream = httpx.AsyncClient(base_url=target, timeout=None, trust_env=False)

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._upstream.aclose()

        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=["GET", "POST"])], lifespan=lifespan)
        [self.port] = free_ports(1)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)

    async def _pass_on(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        # Stripped: some send an empty key behind "Bearer ", which httpx does not pass on.
        headers = [(name, value.strip()) for name, value in request.headers.raw if name.decode() not in HOPS]
        upstream = self._upstream.build_request(
            request.method, path, params=request.query_params, headers=headers, content=body
        )
        answer = await self._upstream.send(upstream, stream=True)
        if body and path in PATHS:
            content = json.loads(body)
            said = {"path": path, "status": answer.status_code, "body": content}
            if len(body) <= LONGEST:
                self._bodies.setdefault(self.client, {}).setdefault((path, shape(content)), said)
        kept = {name: value for name, value in answer.headers.items() if name not in HOPS}

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(parts(), answer.status_code, kept)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        wait_until(lambda: self._server.started, 10, "the recorder listens")

    def stop(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join()

    def write(self, folder: Path) -> None:
        """Write a file for each client: a list of path, status of the answer, and body."""
        for client, bodies in self._bodies.items():
            ordered = sorted(bodies.values(), key=lambda said: (said["path"], json.dumps(said["body"], sort_keys=True)))
            (folder / f"{client}.json").write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """Run a ``Recorder`` for the duration of the block."""
    recorder = Recorder(target)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
