"""What every endpoint needs; made once by ``make_app`` and found through the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from ...runtime.options import ServerOptions
from .engine_client import EngineClient
from .health import HealthCheck


@dataclass(frozen=True)
class HttpState:
    """``started`` is Unix time in whole seconds."""

    options: ServerOptions
    engine: EngineClient
    health: HealthCheck
    epoch: str
    version: str
    started: int

    @staticmethod
    def of(request: Request) -> HttpState:
        """The state of the app that serves ``request``."""
        return cast(HttpState, request.app.state.http)
