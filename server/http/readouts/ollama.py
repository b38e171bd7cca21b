"""``POST /api/embed`` and ``/api/embeddings``: Ollama's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ....messages.readout import Readout
from ....runtime.web.json_response import json_response
from ..endpoint import endpoint
from ..engine.plan import make_prompts
from ..engine.submission import Choice
from ..errors import bad_request
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..ollama.answers import OllamaError
from ..ollama.names import answered_name
from ..parsing import parse_body
from ..state import HttpState
from .answers import OllamaEmbedAnswer, OllamaEmbeddingsAnswer
from .plans import check_inputs, group_of, plan_readouts
from .schemas import OllamaEmbedBody, OllamaEmbeddingsBody, ReadoutBody
from .vectors import VectorRenderer, as_json, embedding_of

NS_PER_SECOND = 1_000_000_000


@endpoint(OllamaEmbedAnswer, body=OllamaEmbedBody, error=OllamaError)
async def embed(request: Request) -> Response:
    """Answer with the embedding of each input, normalised to length 1."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, OllamaEmbedBody)))
    renderer = EmbedRenderer(answered_name(body.model, state.model), body.dimensions)
    if not body.input:
        return loaded(body, renderer.answer([]))
    batch = isinstance(body.input, list)
    check_inputs("input", len(body.input) if batch else 1)
    prompts = make_prompts("input", body.input if isinstance(body.input, list) else [body.input], None)
    readout = Readout(state.model.pooling, truncate=body.truncate)
    plans = await plan_readouts(state, body, prompts, readout, batch=batch)
    return EngineResponse(state.engine, plans, renderer, stream=False, group=group_of(body))


@endpoint(OllamaEmbeddingsAnswer, body=OllamaEmbeddingsBody, error=OllamaError)
async def old_embeddings(request: Request) -> Response:
    """Answer with the embedding of one prompt, normalised to length 1."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, OllamaEmbeddingsBody)))
    answered_name(body.model, state.model)
    if not body.prompt:
        return loaded(body, {"embedding": []})
    prompts = make_prompts("prompt", [body.prompt], None)
    plans = await plan_readouts(state, body, prompts, Readout(state.model.pooling), batch=False)
    return EngineResponse(state.engine, plans, OldRenderer(), stream=False)


def loaded(body: ReadoutBody, answer: dict[str, Any]) -> Response:
    """Return ``answer`` as the response to a body without a text, by which clients load a model ahead of time.

    ``answer``: the whole JSON, without an embedding. Nothing is loaded, as the model is there. Raises ``ApiError`` 400
    if the body has no model either.
    """
    if not body.model:
        raise bad_request("model", "is required")
    return json_response(answer)


class EmbedRenderer(VectorRenderer):
    """Writes the answer of ``/api/embed``."""

    def __init__(self, model: str, dimensions: int | None) -> None:
        self._model = model
        self._dimensions = dimensions

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        return {
            "model": self._model,
            "embeddings": [as_json(embedding_of(choice, self._dimensions)) for choice in choices],
            "total_duration": round(max((choice.seconds for choice in choices), default=0.0) * NS_PER_SECOND),
            "load_duration": 0,
            "prompt_eval_count": sum(choice.prompt_tokens or 0 for choice in choices),
        }


class OldRenderer(VectorRenderer):
    """Writes the answer of ``/api/embeddings``."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt"}

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        return {"embedding": as_json(embedding_of(choices[0], None))}
