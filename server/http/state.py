"""State that every endpoint needs; made once by ``make_app`` and reached through the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from ...runtime.web.aside import Aside
from ...runtime.web.body import Uploads
from ...runtime.web.prometheus import MetricsPage
from ...runtime.web.responses.keeper import ResponseKeeper
from ..options import ServerOptions
from .bodies.field_names import FieldNames
from .engine.bootstrap_gate import BootstrapGate
from .engine.engine_client import EngineClient
from .engine.health_check import HealthCheck
from .engine.question_queue import QuestionQueue
from .served_model import ServedModel
from .session_store.session_folder import SessionsOff


@dataclass(frozen=True)
class HttpState:
    """What the endpoints of one app share. ``started``: Unix time in whole seconds. ``field_names`` checks bodies'
    field names.
    """

    options: ServerOptions
    engine: EngineClient
    gate: BootstrapGate
    health: HealthCheck
    model: ServedModel
    field_names: FieldNames
    metrics: MetricsPage
    uploads: Uploads
    aside: Aside
    sessions: SessionsOff
    responses: ResponseKeeper
    questions: QuestionQueue
    epoch: str
    version: str
    started: int

    @staticmethod
    def of(request: Request) -> HttpState:
        """Return the state of the app that serves ``request``."""
        return cast(HttpState, request.app.state.http)
