"""The router's ASGI application: routes, the API key, and the connections to the instances."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..runtime.cluster_secret import RouterKeys
from ..runtime.web.access_log import CLIENT_GONE, AccessCounts, error_shape
from ..runtime.web.apis import path_table
from ..runtime.web.client.client import HttpClient
from ..runtime.web.cluster_auth import OPEN_CLUSTER, ClusterClient
from ..runtime.web.errors import error_fields
from ..runtime.web.guard import guard
from ..runtime.web.json_response import json_response
from ..runtime.web.keys import read_keys
from ..runtime.web.paths import AtRouter, Server
from ..runtime.web.responses.keeper import ResponseKeeper, open_responses
from .client_bodies import ClientBodies
from .dispatcher import Dispatcher
from .endpoints import HEALTH_PROMPT, ControlEndpoints, GenerationEndpoint
from .errors import RouterError
from .fleet import Fleet
from .health import HealthMonitor
from .kept_responses import ResponsesEndpoint
from .members import Members
from .members_file import MembersFile
from .metrics import RouterMetrics
from .options import RouterOptions
from .sessions import SessionEndpoints
from .workers import WorkerEndpoints

DEAD_HOST_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]
"""Socket options that detect a vanished host within about 6 s, even while an answer is silent."""


def make_client(options: RouterOptions) -> HttpClient:
    """Make the HTTP client for all requests to instances. It signs them if the options have a ``cluster_secret_file``.

    Raises ``ClusterSecretError`` for a file that can't be used.
    """
    # An answer is passed on as it is, so it must come uncompressed.
    headers = [(b"accept-encoding", b"identity"), (b"user-agent", b"pdserve-router")]
    keys = RouterKeys.read(options.cluster_secret_file)
    cluster = ClusterClient(keys, options.hang_timeout) if keys is not None else OPEN_CLUSTER
    return HttpClient(headers, options.connect_timeout, DEAD_HOST_OPTIONS, cluster)


def make_app(
    options: RouterOptions, on_fault: Callable[[BaseException], None], own_admin_key: str | None = None
) -> ASGIApp:
    """Make the router's ASGI application. Its lifespan runs the health checks, and follows ``--members-file``.

    ``on_fault`` is called when one of the two fails itself. The states of instances are then no longer true, so
    it must end the process. ``own_admin_key``: the admin key that the router drew at its start, None if it drew none.
    """
    fleet = Fleet(options)
    client = make_client(options)
    monitor = HealthMonitor(fleet, client, options)
    dispatcher = Dispatcher(fleet, client, options)
    bodies = ClientBodies(options.max_body_bytes, options.max_held_body_bytes)
    control = ControlEndpoints(fleet, client, bodies, options)
    sessions = SessionEndpoints(control, fleet, bodies)
    members = Members(fleet, monitor, client, options.member_drain_timeout)
    generation = GenerationEndpoint(dispatcher, bodies, has_keys=bool(read_keys(options)))
    health_prompt = GenerationEndpoint(dispatcher, bodies, orjson.dumps(HEALTH_PROMPT))
    keeper = open_responses(options, is_router=True)
    access_counts = AccessCounts()
    metrics = RouterMetrics(fleet, access_counts)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        files = [] if options.members_file is None else [MembersFile(options.members_file, members)]
        try:
            async with in_background(on_fault, monitor.run, *(file.run for file in files)):
                yield
        finally:
            client.close()
            keeper.close()

    app = Starlette(
        routes=make_routes(
            {
                **own_endpoints(control, sessions, metrics),
                **worker_endpoints(WorkerEndpoints(members, bodies)),
                **response_endpoints(generation, keeper, bodies),
                "health_generate": health_prompt,
            },
            {
                AtRouter.GENERATE: generation,
                AtRouter.READ_PROMPT: generation,
                AtRouter.ASK_ONE: control.ask_one,
            },
        ),
        exception_handlers={
            RouterError: answer_router_error,
            ClientDisconnect: answer_disconnected,
            Exception: answer_unexpected,
        },
        lifespan=lifespan,
    )
    return guard(app, options, Server.ROUTER, access_counts, metrics.observe, own_admin_key=own_admin_key)


@contextlib.asynccontextmanager
async def in_background(
    on_fault: Callable[[BaseException], None], *jobs: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Run ``jobs`` until the block ends, and cancel them then. ``on_fault`` is called with the error of one that fails.

    The first job has begun to run when the second one does.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            on_fault(error)

    tasks = [asyncio.create_task(job()) for job in jobs]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


Endpoints = Mapping[str, Callable[..., Any]]
"""Endpoints by the name that their paths declare."""


def make_routes(own: Endpoints, shared: Mapping[AtRouter, Callable[..., Any]]) -> list[Route]:
    """Return a route for each path that ``runtime/web/apis.py`` declares for routers.

    ``own``: endpoints for certain paths. ``shared``: endpoints for all others, by how a router serves them.
    """
    return [
        Route(facts.path, own.get(facts.name) or shared[facts.at_router], methods=list(facts.methods))
        for facts in path_table(Server.ROUTER).paths
    ]


def response_endpoints(generation: GenerationEndpoint, keeper: ResponseKeeper, bodies: ClientBodies) -> Endpoints:
    """Return the endpoints of ``/v1/responses``."""
    return {
        "create_response": ResponsesEndpoint(generation, keeper, bodies),
        "get_response": keeper.get,
        "cancel_response": keeper.cancel,
        "delete_response": keeper.delete,
    }


def worker_endpoints(workers: WorkerEndpoints) -> Endpoints:
    """Return the endpoints of ``/workers``."""
    return {
        "list_workers": workers.listed,
        "add_worker": workers.add,
        "change_worker": workers.change,
        "remove_worker": workers.remove,
    }


def own_endpoints(control: ControlEndpoints, sessions: SessionEndpoints, metrics: RouterMetrics) -> Endpoints:
    """Return the endpoints that the router answers itself, or after asking every instance."""
    return {
        "health": control.health,
        "livez": control.livez,
        "running": control.running,
        "metrics": metrics.page,
        "targets": metrics.targets,
        "server_info": control.server_info,
        "transfers": control.transfers,
        "abort_request": control.abort_request,
        "flush_cache": control.flush_cache,
        "list_sessions": sessions.listed,
        "delete_session": sessions.delete,
        "snapshot": sessions.snapshot,
        "restore": sessions.restore,
        "slot_action": sessions.slots,
    }


async def answer_router_error(request: Request, exc: Exception) -> Response:
    """Return the response for a ``RouterError`` of an endpoint: its status, headers, and fields in the API's shape."""
    assert isinstance(exc, RouterError)
    response = json_response(error_shape(request.scope)(exc.fields()), exc.status)
    response.raw_headers.extend(exc.all_headers())
    return response


async def answer_disconnected(request: Request, exc: Exception) -> Response:
    """Return an empty response with status 499, because the client left in the middle of its request.

    This is no error of the router, so no traceback is logged. The response reaches only the access log and the metrics.
    """
    return Response(status_code=CLIENT_GONE)


async def answer_unexpected(request: Request, exc: Exception) -> Response:
    """Return a response with status 500, in the error shape of the path's API, after a fault of the router itself.

    Its message refers to the log, which has the traceback. The HTTP server closes the connection then.
    """
    fields = error_fields(500, "the router failed on this request; its log says why", "server_error")
    response = json_response(error_shape(request.scope)(fields), 500)
    response.headers["connection"] = "close"
    return response
