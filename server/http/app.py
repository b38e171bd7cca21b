"""The FastAPI application: its paths, and the endpoint that answers each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...runtime.options import ServerOptions
from ...runtime.web.access_log import AccessCounts
from ...runtime.web.aside import Aside
from ...runtime.web.body import MAX_UPLOADS, Uploads
from ...runtime.web.guard import guard
from ...runtime.web.paths import Server
from ...runtime.web.prometheus import MetricsPage
from .admin.admin import (
    abort_request,
    flush_cache,
    health,
    health_generate,
    livez,
    metrics,
    model_info,
    server_info,
    transfers,
)
from .admin.kv_hashes import KVHashesBody, kv_hashes
from .admin.memory import ReleaseBody, ResizeBody, ResumeBody, release_memory, resize_pool, resume_memory
from .admin.moving import DrainBody, MigrateBody, RoleBody, drain, migrate, moved, role
from .admin.profiling import StartProfileBody, StopProfileBody, start_profile, stop_profile
from .admin.schemas import AbortBody
from .answers import (
    Aborted,
    Alive,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    Draining,
    Flushed,
    GenerateAnswer,
    Generated,
    KVHashesAnswer,
    MemoryReleased,
    MemoryResumed,
    MetricsText,
    Migrated,
    ModelCard,
    ModelInfo,
    ModelList,
    PoolResized,
    ProfileStarted,
    ProfileStopped,
    Ready,
    RoleChanged,
    ServerInfoAnswer,
    Text,
    Tokens,
    TransfersAnswer,
)
from .bodies.field_names import FieldNames
from .bodies.fields import Body
from .docs_page import docs_page
from .engine.bootstrap_gate import BootstrapGate
from .engine.engine_client import EngineClient
from .engine.health_check import HealthCheck
from .engine.moved_answers import PATH as MOVED_PATH
from .engine.question_queue import QuestionQueue
from .errors import install_error_handlers
from .metrics.instance_metrics import InstanceMetrics
from .native.generate import generate
from .native.schemas import GenerateBody
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.schemas import ChatBody, CompletionBody
from .openapi import Described, QueryParameter, make_openapi
from .parsing import MAX_BODY_BYTES, MAX_BODY_VALUES
from .served_model import ServedModel
from .session_store.session_folder import Sessions, open_sessions
from .sessions.endpoints import delete_session, list_sessions, restore, snapshot
from .sessions.schemas import (
    Deleted,
    RestoreAnswer,
    RestoreBody,
    SessionList,
    SlotAnswer,
    SlotBody,
    SnapshotAnswer,
    SnapshotBody,
)
from .sessions.slots import ACTIONS, slot_action
from .state import HttpState
from .text.models import detokenize, get_model, list_models, tokenize
from .text.schemas import DetokenizeBody, TokenizeBody

Endpoint = Callable[[Request], Awaitable[Response]]

SESSION_PATH = "/kv/sessions/{name:path}"
SLOTS_PATH = "/slots/{id:path}"
QUESTIONS: tuple[tuple[str, Endpoint, type[BaseModel]], ...] = (
    ("/health", health, Ready),
    ("/readyz", health, Ready),
    ("/livez", livez, Alive),
    ("/health_generate", health_generate, Ready),
    ("/metrics", metrics, MetricsText),
    ("/server_info", server_info, ServerInfoAnswer),
    ("/get_server_info", server_info, ServerInfoAnswer),
    ("/transfers", transfers, TransfersAnswer),
    ("/model_info", model_info, ModelInfo),
    ("/get_model_info", model_info, ModelInfo),
    ("/kv/sessions", list_sessions, SessionList),
    ("/v1/models", list_models, ModelList),
    ("/v1/models/{name:path}", get_model, ModelCard),
)
ORDERS: tuple[tuple[str, Endpoint, type[Body], type[BaseModel]], ...] = (
    ("/generate", generate, GenerateBody, GenerateAnswer),
    ("/v1/completions", completions, CompletionBody, CompletionAnswer),
    ("/v1/chat/completions", chat_completions, ChatBody, ChatAnswer),
    ("/tokenize", tokenize, TokenizeBody, Tokens),
    ("/detokenize", detokenize, DetokenizeBody, Text),
    ("/abort_request", abort_request, AbortBody, Aborted),
    ("/kv/snapshot", snapshot, SnapshotBody, SnapshotAnswer),
    ("/kv/restore", restore, RestoreBody, RestoreAnswer),
    (SLOTS_PATH, slot_action, SlotBody, SlotAnswer),
    ("/migrate", migrate, MigrateBody, Migrated),
    ("/drain", drain, DrainBody, Draining),
    ("/role", role, RoleBody, RoleChanged),
    ("/release_memory_occupation", release_memory, ReleaseBody, MemoryReleased),
    ("/resume_memory_occupation", resume_memory, ResumeBody, MemoryResumed),
    ("/kv/resize", resize_pool, ResizeBody, PoolResized),
    ("/kv/hashes", kv_hashes, KVHashesBody, KVHashesAnswer),
    ("/start_profile", start_profile, StartProfileBody, ProfileStarted),
    ("/stop_profile", stop_profile, StopProfileBody, ProfileStopped),
)
STREAMS: dict[str, type[BaseModel]] = {
    "/generate": Generated,
    "/kv/restore": Generated,
    "/v1/completions": CompletionAnswer,
    "/v1/chat/completions": ChatChunk,
}
"""Schema of one event of a streamed answer, by path."""
QUERIES = {
    SESSION_PATH: (QueryParameter("owner"),),
    SLOTS_PATH: (QueryParameter("action", ACTIONS, required=True),),
}
"""Query parameters, by path."""


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
    app = FastAPI(title="pdserve", version=version("pdserve"), redirect_slashes=False, docs_url=None, redoc_url=None)
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
    described = {
        "/flush_cache": Described(None, Flushed),
        SESSION_PATH: Described(None, Deleted, query=QUERIES[SESSION_PATH]),
    }
    for path, endpoint, answer in QUESTIONS:
        app.add_api_route(path, endpoint, methods=["GET"])
        described[path] = Described(None, answer)
    for path, endpoint, body, answer in ORDERS:
        app.add_api_route(path, endpoint, methods=["POST"])
        described[path] = Described(body, answer, STREAMS.get(path), QUERIES.get(path, ()))
    app.add_api_route("/flush_cache", flush_cache, methods=["POST"])
    app.add_api_route(SESSION_PATH, delete_session, methods=["DELETE"])
    # For other instances: a valid ticket is the only key that is needed.
    app.add_api_route(MOVED_PATH, moved, methods=["POST"], include_in_schema=False)
    app.add_api_route("/docs", docs_page, methods=["GET"], include_in_schema=False)
    app.openapi = make_openapi(app, described)  # type: ignore[method-assign]
    install_error_handlers(app)
    return guard(app, options, Server.INSTANCE, counts, epoch=epoch, own_admin_key=own_admin_key)
