"""The Starlette application: an endpoint for each path that ``runtime/web/apis.py`` declares for instances.

FastAPI only describes the endpoints (``pages/openapi.py``). It takes longer to import than all else in this process.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from ...runtime.web.access_log import AccessCounts
from ...runtime.web.apis import path_table
from ...runtime.web.aside import Aside
from ...runtime.web.body import MAX_UPLOADS, Uploads
from ...runtime.web.guard import guard
from ...runtime.web.paths import DELETE, GET, GET_OR_POST, POST, PathFacts, Server
from ...runtime.web.prometheus import MetricsPage
from ...runtime.web.responses.keeper import open_responses
from ..options import ServerOptions
from .bodies.field_names import FieldNames
from .endpoint import HttpEndpoint
from .engine.bootstrap_gate import BootstrapGate
from .engine.engine_client import EngineClient
from .engine.health_check import HealthCheck
from .engine.question_queue import QuestionQueue
from .errors import install_error_handlers
from .metrics.instance_metrics import InstanceMetrics
from .pages.openapi import make_openapi
from .parsing import MAX_BODY_BYTES, MAX_BODY_VALUES
from .served_model import ServedModel
from .session_store.session_folder import open_sessions
from .state import HttpState

METHOD_ORDER = (GET, GET_OR_POST, POST, DELETE)
"""Order of the OpenAPI page. Within a method it is that of the declarations."""


def make_app(
    options: ServerOptions,
    engine: EngineClient,
    epoch: str,
    model: ServedModel | None = None,
    own_admin_key: str | None = None,
) -> ASGIApp:
    """Make the ASGI application of an instance, with access log and checks of requests, in front of ``engine``.

    ``epoch``: id of this start of the instance. ``model``: None means what the options say about the model, without
    reading its files. ``own_admin_key``: admin key that the server drew at its start. It counts only if ``options``
    have none.
    """
    endpoints = {facts: load_endpoint(facts) for facts in sorted(path_table(Server.INSTANCE).paths, key=_method_order)}
    responses = open_responses(options, is_router=False)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        responses.close()

    app = Starlette(routes=[_route(facts, found) for facts, found in endpoints.items()], lifespan=lifespan)
    app.router.redirect_slashes = False
    counts = AccessCounts()
    info = {"model": options.model_name, "version": version("pdserve"), "epoch": epoch}
    app.state.http = HttpState(
        options=options,
        engine=engine,
        gate=BootstrapGate(options),
        health=HealthCheck(engine),
        model=model or ServedModel(options.model_names, options.model_path),
        field_names=FieldNames(options.unknown_fields),
        metrics=MetricsPage(InstanceMetrics(options, engine, counts, info).families),
        sessions=open_sessions(options),
        responses=responses,
        uploads=Uploads(MAX_UPLOADS * MAX_BODY_BYTES, MAX_BODY_VALUES),
        aside=Aside(),
        questions=QuestionQueue(),
        epoch=epoch,
        version=version("pdserve"),
        started=int(time.time()),
    )
    app.state.openapi = make_openapi(version("pdserve"), endpoints)
    install_error_handlers(app)
    return guard(app, options, Server.INSTANCE, counts, epoch=epoch, own_admin_key=own_admin_key)


def _method_order(facts: PathFacts) -> int:
    return METHOD_ORDER.index(facts.methods)


def _route(facts: PathFacts, found: HttpEndpoint) -> Route:
    route = Route(facts.path, found.handler, methods=list(facts.methods))
    # Starlette lets HEAD in wherever GET is declared.
    route.methods = set(facts.methods)
    return route


def load_endpoint(facts: PathFacts) -> HttpEndpoint:
    """Import the module that ``facts`` name, and return the path's endpoint from it."""
    found = getattr(import_module(f".{facts.module}", __package__), facts.name)
    assert isinstance(found, HttpEndpoint), facts
    return found
