"""``POST /v1/embeddings``: OpenAI's embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....messages.readout import Readout
from ..endpoint import endpoint
from ..engine.submission import Choice
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..openai.completions import read_prompts
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import EmbeddingsAnswer
from .plans import check_inputs, group_of, plan_readouts
from .schemas import EmbeddingsBody
from .vectors import F32, VectorRenderer, as_base64, as_json, embedding_of, usage


@endpoint(EmbeddingsAnswer, body=EmbeddingsBody)
async def embeddings(request: Request) -> Response:
    """Answer with the embedding of each input, normalised to length 1."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, EmbeddingsBody)))
    check_model(body.model, state.model)
    prompts, batch = read_prompts(body.input, "input")
    check_inputs("input", len(prompts))
    readout, special = Readout(state.model.pooling), body.add_special_tokens
    plans = await plan_readouts(state, body, prompts, readout, batch=batch, add_special_tokens=special)
    encode = as_base64 if body.encoding_format == "base64" else as_json
    renderer = EmbeddingsRenderer(state.model.name, body.dimensions, encode)
    return EngineResponse(state.engine, plans, renderer, stream=False, group=group_of(body))


class EmbeddingsRenderer(VectorRenderer):
    """Writes a list of embeddings. ``encode`` returns one as the client wants it."""

    def __init__(self, model: str, dimensions: int | None, encode: Callable[[F32], Any]) -> None:
        self._model = model
        self._dimensions = dimensions
        self._encode = encode

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        data = [
            {"object": "embedding", "index": i, "embedding": self._encode(embedding_of(choice, self._dimensions))}
            for i, choice in enumerate(choices)
        ]
        return {"object": "list", "data": data, "model": self._model, "usage": usage(choices)}
