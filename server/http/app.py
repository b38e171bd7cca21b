"""The FastAPI application: an endpoint for each path that ``runtime/web/apis.py`` declares for instances."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.metadata import version

from fastapi import FastAPI
from starlette.types import ASGIApp

from ...runtime.web.access_log import AccessCounts
from ...runtime.web.apis import path_table
from ...runtime.web.aside import Aside
from ...runtime.web.body import MAX_UPLOADS, Uploads
from ...runtime.web.guard import guard
from ...runtime.web.paths import DELETE, GET, POST, PathFacts, Server
from ...runtime.web.prometheus import MetricsPage
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
from .session_store.session_folder import Sessions, open_sessions
from .state import HttpState

METHOD_ORDER = (GET, POST, DELETE)
"""Order of the OpenAPI page. Within a method it is that of the declarations."""


def make_app(
    options: ServerOptions,
    engine: EngineClient,
    epoch: str,
    model: ServedModel | None = None,
    own_admin_key: str | None = None,
) -> ASGIApp:
    """Make the application in front of ``engine``.

    ``model``: None means what the options say about the model, without reading its files. ``own_admin_key``: see
    ``guard``.
    """
    app = FastAPI(title="pdserve", version=version("pdserve"), redirect_slashes=False, openapi_url=None)
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
        sessions=Sessions(open_sessions(options)),
        uploads=Uploads(MAX_UPLOADS * MAX_BODY_BYTES, MAX_BODY_VALUES),
        aside=Aside(),
        questions=QuestionQueue(),
        epoch=epoch,
        version=version("pdserve"),
        started=int(time.time()),
    )
    endpoints: dict[str, HttpEndpoint] = {}
    for facts in sorted(path_table(Server.INSTANCE).paths, key=lambda facts: METHOD_ORDER.index(facts.methods)):
        found = endpoints[facts.path] = load_endpoint(facts)
        methods, is_shown = list(facts.methods), found.answer is not None
        app.add_api_route(facts.path, found.handler, methods=methods, include_in_schema=is_shown)
    app.openapi = make_openapi(app, endpoints)  # type: ignore[method-assign]
    install_error_handlers(app)
    return guard(app, options, Server.INSTANCE, counts, epoch=epoch, own_admin_key=own_admin_key)


def load_endpoint(facts: PathFacts) -> HttpEndpoint:
    """Return the endpoint that a declaration names."""
    found = getattr(import_module(f".{facts.module}", __package__), facts.name)
    assert isinstance(found, HttpEndpoint), facts
    return found
