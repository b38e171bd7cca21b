"""``GET /api/tags``, ``/api/ps``, ``/api/version`` and ``/``, and ``POST /api/show``: the model and the server."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....messages.control import ServerInfoReq
from ....runtime.web.apis import OLLAMA_RUNS
from .. import answers
from ..endpoint import endpoint
from ..engine.question_client import QuestionRefused
from ..errors import bad_request
from ..parsing import parse_body
from ..state import HttpState
from .answers import (
    Capability,
    ListedModel,
    ListedModels,
    OllamaError,
    RunningModel,
    RunningModels,
    ShownModel,
    VersionAnswer,
)
from .model_files import ModelFiles, read_model_files
from .names import answered_name, tagged
from .schemas import OllamaShowBody

TIMEOUT_SECONDS = 30.0
"""Timeout of another process's answer."""
OLLAMA_VERSION = "0.33.0"
"""Version of Ollama that has this API. Clients refuse versions that lack what they need."""
NEVER = "9999-12-31T23:59:59Z"
"""Time at which the model will be unloaded."""


@endpoint()
async def running(request: Request) -> Response:
    """Answer that the server runs, in the words that Ollama's clients look for."""
    return PlainTextResponse(OLLAMA_RUNS)


@endpoint(VersionAnswer, error=OllamaError)
async def version(request: Request) -> Response:
    """Answer with the version of Ollama that has this API, and the server's own."""
    return answers.respond(VersionAnswer(version=OLLAMA_VERSION, pdserve=HttpState.of(request).version))


@endpoint(ListedModels, error=OllamaError)
async def list_models(request: Request) -> Response:
    """List the served model by each of its names."""
    state = HttpState.of(request)
    files = await files_of(state)
    models = [ListedModel(**_entry(name, files), modified_at=files.modified_at) for name in state.model.names]
    return answers.respond(ListedModels(models=models))


@endpoint(RunningModels, error=OllamaError)
async def list_running(request: Request) -> Response:
    """List the served model by each of its names, with its place in memory. The list is empty while it loads."""
    state = HttpState.of(request)
    try:
        info = (await state.engine.questions.ask(ServerInfoReq(), TIMEOUT_SECONDS)).info
        limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    except QuestionRefused:
        return answers.respond(RunningModels(models=[]))
    files = await files_of(state)
    is_on_cpu = str(info.get("device", "cpu")).startswith("cpu")
    place: dict[str, Any] = {
        "expires_at": NEVER,
        "size_vram": 0 if is_on_cpu else files.size,
        "context_length": limits.context_length,
    }
    return answers.respond(RunningModels(models=[RunningModel(**_entry(n, files), **place) for n in state.model.names]))


@endpoint(ShownModel, body=OllamaShowBody, error=OllamaError)
async def show(request: Request) -> Response:
    """Answer with what is known of the model: its family, its limits and its capabilities."""
    state = HttpState.of(request)
    body = await parse_body(request, OllamaShowBody)
    if not (body.model or body.name):
        raise bad_request("model", "is required")
    name = answered_name(body.model or body.name, state.model)
    files, formats = await files_of(state), state.model.formats
    limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    family = files.family or "model"
    capabilities: list[Capability] = ["completion"]
    if formats.renders_tools and formats.calls is not None:
        capabilities.append("tools")
    if formats.reasoning is not None:
        capabilities.append("thinking")
    shown = ShownModel(
        modelfile="",
        parameters="",
        template=state.model.template,
        details=files.details,
        model_info={
            "general.architecture": family,
            "general.basename": name,
            f"{family}.context_length": limits.context_length,
            f"{family}.vocab_size": limits.vocab_size,
        },
        capabilities=capabilities,
        modified_at=files.modified_at,
    )
    return answers.respond(shown)


async def files_of(state: HttpState) -> ModelFiles:
    """Return what the model's files say, which are read at the first call."""
    options = state.options
    return await state.aside.run(True, lambda: read_model_files(options.model_path, options.revision))


def _entry(name: str, files: ModelFiles) -> dict[str, Any]:
    tag = tagged(name)
    return {"name": tag, "model": tag, "size": files.size, "digest": files.digest, "details": files.details}
