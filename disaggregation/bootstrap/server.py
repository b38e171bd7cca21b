"""The bootstrap server of an instance: tells others how to reach it.

    PUT    /registration          the instance registers, or renews its lease (a ``Registration`` as JSON)
    GET    /registration          the current registration; 503 with the reason while there is none
    DELETE /registration?epoch=E  the instance withdraws
    GET    /health                200: this server answers

``PUT`` and ``DELETE`` are for this instance's own processes. They show the secret of their supervisor
(``Authorization: Bearer …``). So no other program that reaches this port can take the instance's place. The answer to a
``GET`` is no secret.

A refusal is ``{"error": reason}``. Its status is 400 for an invalid registration, 401 without the secret, 409 for a
past epoch, and 413 for a body that is too long.
"""

from __future__ import annotations

from ...runtime import clean_start  # isort: skip  # noqa: F401

import asyncio
import hmac
import logging
import socket
import sys
from collections.abc import Callable

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.child import start_child
from ...runtime.process_options import ChildOptions
from ...runtime.signals import STOP
from ...runtime.web.body import BodyEncoded, BodyTooLarge, read_body
from ...runtime.web.bounded_protocol import BACKLOG, MAX_HEAD_BYTES, bounded_protocol
from ...runtime.web.ports import http_url, listen
from ...runtime.web.server import ChildServer
from ..errors import InvalidRegistration, NotRegistered, RegistrationConflict
from .port_file import announce_port
from .registration import MAX_REGISTRATION_BYTES, BootstrapError, decode_registration
from .registry import Registry

log = logging.getLogger(__name__)
OPTIONS = ChildOptions
SHUTDOWN_SECONDS = 1
RETRY_AFTER = {"Retry-After": "1"}


def make_app(registry: Registry, secret: str) -> Starlette:
    """Make the web application that serves ``registry``.

    The instance's own processes show ``secret``, which must not be empty, to register or withdraw.
    """
    assert secret
    expected = f"Bearer {secret}".encode()

    def is_own(request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, expected)

    async def put(request: Request) -> Response:
        if not is_own(request):
            return _unauthorized()
        try:
            registry.register(decode_registration(await read_body(request, MAX_REGISTRATION_BYTES)))
        except ClientDisconnect:
            return Response(status_code=400)  # The connection is gone: an answer is only for the log.
        except BodyEncoded as e:
            return _refusal(415, str(e))
        except BodyTooLarge as e:
            return _refusal(413, str(e))
        except InvalidRegistration as e:
            return _refusal(400, str(e))
        except RegistrationConflict as e:
            return _refusal(409, str(e))
        return Response(status_code=204)

    async def get(request: Request) -> Response:
        try:
            return _json(200, registry.current())
        except NotRegistered as e:
            return _refusal(503, str(e), RETRY_AFTER)

    async def delete(request: Request) -> Response:
        if not is_own(request):
            return _unauthorized()
        epoch = request.query_params.get("epoch", "")
        if not epoch:
            return _refusal(400, "say which instance withdraws: DELETE /registration?epoch=…")
        try:
            registry.withdraw(epoch, for_now=request.query_params.get("for_now") == "1")
        except RegistrationConflict as e:
            return _refusal(409, str(e))
        return Response(status_code=204)

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    return Starlette(
        routes=[
            Route("/registration", put, methods=["PUT"]),
            Route("/registration", get, methods=["GET"]),
            Route("/registration", delete, methods=["DELETE"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


def _json(status: int, body: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _refusal(status: int, error: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, BootstrapError(error), headers)


def _unauthorized() -> Response:
    text = "only the instance that this bootstrap server belongs to may register, renew or withdraw its registration"
    return _refusal(401, text, {"WWW-Authenticate": "Bearer"})


async def serve(app: Starlette, sock: socket.socket, on_started: Callable[[], None]) -> None:
    """Serve ``app`` on ``sock`` until the signal ``STOP``; call ``on_started`` once it accepts requests."""
    config = uvicorn.Config(
        app,
        http=bounded_protocol(),
        backlog=BACKLOG,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = ChildServer(config, on_started)
    asyncio.get_running_loop().add_signal_handler(STOP, setattr, server, "should_exit", True)
    await server.serve(sockets=[sock])


def main() -> None:
    """Run the bootstrap server, as a child process of the supervisor, until it is stopped."""
    ctx = start_child(sys.argv, OPTIONS)
    options = ctx.options
    port = options.own_bootstrap_port
    try:
        sock = listen(options.host, port, BACKLOG)
    except OSError as e:
        place = f"{options.host}:{port}"
        sys.exit(f"can't listen on {place}: {e.strerror}. Choose another --disaggregation-bootstrap-port.")
    port = sock.getsockname()[1]
    announce_port(ctx.run_dir, port)
    log.info("the bootstrap server listens on %s", http_url(options.host, port))
    asyncio.run(serve(make_app(Registry(), ctx.secret), sock, ctx.report_ready))


if __name__ == "__main__":
    main()
