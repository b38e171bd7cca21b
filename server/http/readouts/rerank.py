"""``POST /v1/rerank``: documents in the order of their relevance, in Jina's, Cohere's and vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ..endpoint import endpoint
from ..engine.submission import Choice
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import RerankAnswer
from .plans import check_joined, group_of, plan_readouts
from .relevance import FIELD_NAMES, pair_prompt, relevance, yes_and_no
from .schemas import RerankBody
from .vectors import VectorRenderer, usage


@endpoint(RerankAnswer, body=RerankBody)
async def rerank(request: Request) -> Response:
    """Answer with the documents and their relevance to the query, the best first."""
    state = HttpState.of(request)
    body = timed(request, await parse_body(request, RerankBody))
    check_model(body.model, state.model)
    shared = len(body.query) + len(body.instruction or "")
    check_joined(sum(shared + len(text) for text in body.texts))
    labels = await yes_and_no(request)
    body = named(request, body)
    prompts = [pair_prompt(body.query, text, body.instruction) for text in body.texts]
    plans = await plan_readouts(state, body, prompts, labels, batch=True)
    shown = body.texts if body.return_documents else None
    renderer = RerankRenderer(state.model.name, shown, body.top_n)
    return EngineResponse(state.engine, plans, renderer, stream=False, group=group_of(body))


class RerankRenderer(VectorRenderer):
    """Writes the ranks. ``texts``: documents to repeat, None for none. ``top_n``: number of results, None for all."""

    field_names: ClassVar[Mapping[str, str]] = FIELD_NAMES

    def __init__(self, model: str, texts: Sequence[str] | None, top_n: int | None) -> None:
        self._model = model
        self._texts = texts
        self._top_n = top_n

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        scores = [relevance(choice) for choice in choices]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]
        results = [{"index": i, "relevance_score": scores[i], **self._document(i)} for i in best]
        return {"id": choices[0].rid, "model": self._model, "results": results, "usage": usage(choices)}

    def _document(self, i: int) -> dict[str, Any]:
        return {} if self._texts is None else {"document": {"text": self._texts[i]}}
