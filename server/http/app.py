"""The FastAPI application: which path is answered by what."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ...runtime.options import ServerOptions
from ...runtime.web.auth import ApiKeyAuth
from .admin import abort_request, flush_cache, health, health_generate, model_info, server_info
from .chat import chat_completions
from .completions import completions
from .engine_client import EngineClient
from .errors import install_error_handlers
from .fields import Body
from .generate import generate
from .health import HealthCheck
from .models import get_model, list_models
from .openai_schemas import ChatBody, CompletionBody
from .schemas import AbortBody, GenerateBody
from .state import HttpState

Endpoint = Callable[[Request], Awaitable[Response]]

QUESTIONS: tuple[tuple[str, Endpoint], ...] = (
    ("/health", health),
    ("/health_generate", health_generate),
    ("/server_info", server_info),
    ("/get_server_info", server_info),
    ("/model_info", model_info),
    ("/get_model_info", model_info),
    ("/v1/models", list_models),
    ("/v1/models/{name:path}", get_model),
)
ORDERS: tuple[tuple[str, Endpoint, type[Body]], ...] = (
    ("/generate", generate, GenerateBody),
    ("/v1/completions", completions, CompletionBody),
    ("/v1/chat/completions", chat_completions, ChatBody),
    ("/abort_request", abort_request, AbortBody),
)


def make_app(options: ServerOptions, engine: EngineClient, epoch: str) -> FastAPI:
    """The application in front of ``engine``."""
    app = FastAPI(title="pdserve", version=version("pdserve"))
    app.state.http = HttpState(
        options=options,
        engine=engine,
        health=HealthCheck(engine),
        epoch=epoch,
        version=version("pdserve"),
        started=int(time.time()),
    )
    for path, endpoint in QUESTIONS:
        app.add_api_route(path, endpoint, methods=["GET"])
    for path, endpoint, body in ORDERS:
        app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=_documented(body))
    for method in ("GET", "POST"):
        app.add_api_route("/flush_cache", flush_cache, methods=[method])
    install_error_handlers(app)
    if options.api_key is not None:
        app.add_middleware(ApiKeyAuth, api_key=options.api_key)
    return app


def _documented(body: type[Body]) -> dict[str, Any]:
    """``body``'s schema for /docs. Endpoints parse their bodies themselves, so FastAPI doesn't know of it."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    return node
