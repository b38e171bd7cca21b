"""The bootstrap server of a prefill instance: tells decode instances how to reach it.

    PUT    /route          the instance registers, or renews its lease (a ``Route`` as JSON)
    GET    /route          the current route; 503 with the reason while there is none
    DELETE /route?epoch=E  the instance withdraws
    GET    /health         200: this server answers

``PUT`` and ``DELETE`` are for this instance's own processes, which show the secret that the supervisor gave them
(``Authorization: Bearer …``): whoever else may reach this port, it can't put itself in the instance's place. What a
``GET`` tells is no secret.

A refusal is ``{"error": reason}``: 400 for what is not a route, 401 without the secret, 409 for an epoch that is over,
413 for too long a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from ..runtime.child import start_child
from .bootstrap import MAX_ROUTE_BYTES, RouteError, decode_route
from .bounded_http import MAX_HEAD_BYTES, BoundedProtocol
from .errors import RouteConflict, RouteInvalid, RouteUnavailable
from .route_registry import RouteRegistry

BACKLOG = 256
SHUTDOWN_SECONDS = 1
RETRY_AFTER = {"Retry-After": "1"}


def make_app(registry: RouteRegistry, secret: str, on_ready: Callable[[], None]) -> FastAPI:
    """The server around ``registry``; ``on_ready`` is called once it can answer.

    ``secret`` is what the instance's own processes show; it must not be empty.
    """
    assert secret
    expected = f"Bearer {secret}".encode()

    def is_own(request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, expected)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        on_ready()
        yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.put("/route")
    async def put_route(request: Request) -> Response:
        if not is_own(request):
            return _unauthorized()
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_ROUTE_BYTES:
                return _refusal(413, f"a route has at most {MAX_ROUTE_BYTES} bytes")
        try:
            registry.register(decode_route(body))
        except RouteInvalid as e:
            return _refusal(400, str(e))
        except RouteConflict as e:
            return _refusal(409, str(e))
        return Response(status_code=204)

    @app.get("/route")
    async def get_route() -> Response:
        try:
            return _json(200, registry.current())
        except RouteUnavailable as e:
            return _refusal(503, str(e), RETRY_AFTER)

    @app.delete("/route")
    async def delete_route(request: Request) -> Response:
        if not is_own(request):
            return _unauthorized()
        epoch = request.query_params.get("epoch", "")
        if not epoch:
            return _refusal(400, "say which instance withdraws: DELETE /route?epoch=…")
        try:
            registry.withdraw(epoch)
        except RouteConflict as e:
            return _refusal(409, str(e))
        return Response(status_code=204)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    return app


def _json(status: int, body: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _refusal(status: int, error: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, RouteError(error), headers)


def _unauthorized() -> Response:
    text = "only the instance that this bootstrap server belongs to may register, renew or withdraw its route"
    return _refusal(401, text, {"WWW-Authenticate": "Bearer"})


class _Server(uvicorn.Server):
    """Leaves signals alone: Ctrl-C is the supervisor's to act on, SIGTERM is ours (below)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: FastAPI, sock: socket.socket) -> None:
    """Answer on ``sock`` until SIGTERM."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = _Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    await server.serve(sockets=[sock])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ``OSError`` where the address is taken."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def main() -> None:
    """Run as a child of the supervisor."""
    ctx = start_child(sys.argv)
    host, port = ctx.options.host, ctx.options.disaggregation_bootstrap_port
    try:
        sock = listen(host, port)
    except OSError as e:
        sys.exit(f"can't listen on {host}:{port}: {e.strerror}. Choose another --disaggregation-bootstrap-port.")
    asyncio.run(serve(make_app(RouteRegistry(), ctx.secret, ctx.report_ready), sock))


if __name__ == "__main__":
    main()
