"""``POST /v1/score``: probabilities of labels as a prompt's next token, in SGLang's form or in vLLM's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....messages.readout import Readout
from ..endpoint import endpoint
from ..engine.plan import Prompt, make_prompts
from ..engine.submission import Choice
from ..errors import bad_request
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..openai.completions import read_prompts
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import ScoreAnswer
from .plans import check_joined, group_of, plan_readouts
from .relevance import pair_prompt, relevance, yes_and_no
from .schemas import ScoreBody, joined
from .vectors import VectorRenderer, usage, vector_of


@endpoint(ScoreAnswer, body=ScoreBody)
async def score(request: Request) -> Response:
    """Answer with the probabilities of labels after each item, or with the relevance of pairs of texts."""
    state = HttpState.of(request)
    body = timed(request, await parse_body(request, ScoreBody))
    check_model(body.model, state.model)
    renderer: VectorRenderer
    if body.query is not None and body.items is not None:
        prompts = label_prompts(body.query, read_prompts(body.items, "items")[0], item_first=body.item_first)
        readout = Readout("labels", tuple(body.label_token_ids or ()))
        renderer = LabelRenderer(state.model.name, softmax=body.apply_softmax)
    else:
        prompts, readout = text_pairs(body), await yes_and_no(request)
        renderer = PairRenderer(state.model.name)
    body = named(request, body)
    plans = await plan_readouts(state, body, prompts, readout, batch=True)
    return EngineResponse(state.engine, plans, renderer, stream=False, group=group_of(body))


def label_prompts(query: str | list[int], items: Sequence[Prompt], *, item_first: bool) -> list[Prompt]:
    """Return the query with each item as a prompt. Raises ``ApiError`` 400 if one is text and the other token ids.

    ``item_first``: put the query after the item.
    """
    check_joined(sum(len(query) + len(item.text or item.input_ids or "") for item in items))
    if any((item.text is None) == isinstance(query, str) for item in items):
        raise bad_request("items", "must be of the same kind as query: texts, or token ids")
    pairs: list[Any] = [joined(query, item.text or item.input_ids, item_first=item_first) for item in items]
    return make_prompts("items", *((pairs, None) if isinstance(query, str) else (None, pairs)))


def text_pairs(body: ScoreBody) -> list[Prompt]:
    """Return a prompt for each pair of texts. A single ``text_1`` goes with each of ``text_2``.

    Raises ``ApiError`` 400 for lists of other lengths.
    """
    firsts = body.text_1 if isinstance(body.text_1, list) else [body.text_1 or ""]
    seconds = body.text_2 if isinstance(body.text_2, list) else [body.text_2 or ""]
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if not seconds or len(firsts) != len(seconds):
        raise bad_request(
            "text_2", f"has {len(seconds)} texts for {len(firsts)} of text_1; give one of these, or as many"
        )
    pairs, shared = list(zip(firsts, seconds, strict=True)), len(body.instruction or "")
    check_joined(sum(shared + len(first) + len(second) for first, second in pairs))
    return [pair_prompt(first, second, body.instruction) for first, second in pairs]


class LabelRenderer(VectorRenderer):
    """Writes SGLang's answer. ``softmax``: divide each prompt's probabilities by their sum."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "items", "input_ids": "items"}

    def __init__(self, model: str, *, softmax: bool) -> None:
        self._model = model
        self._softmax = softmax

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        scores = [self._probabilities(choice) for choice in choices]
        return {"object": "scoring", "scores": scores, "model": self._model, "usage": usage(choices)}

    def _probabilities(self, choice: Choice) -> list[float]:
        logprobs = vector_of(choice).astype(np.float64)
        if not self._softmax:
            return np.exp(logprobs).tolist()  # type: ignore[no-any-return]
        # Very small probabilities would all be 0 without this.
        weights = np.exp(logprobs - logprobs.max())
        return (weights / weights.sum()).tolist()  # type: ignore[no-any-return]


class PairRenderer(VectorRenderer):
    """Writes vLLM's answer."""

    field_names: ClassVar[Mapping[str, str]] = {"messages": "text_2"}

    def __init__(self, model: str) -> None:
        self._model = model

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the answer, JSON-ready. Raises ``ApiError``."""
        data = [{"index": i, "object": "score", "score": relevance(choice)} for i, choice in enumerate(choices)]
        return {
            "id": choices[0].rid,
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": data,
            "usage": usage(choices),
        }
