"""``POST /completion``: llama-server's own shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ....messages.requests import LogprobOptions
from ..bodies.large_bodies import LARGE_BATCH
from ..endpoint import endpoint
from ..engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from ..errors import ApiError
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import terms_of, timed
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import LlamaCompletion, LlamaCompletionEvent, LlamaError
from .prompts import TIMEOUT_SECONDS, read_prompts
from .schemas import LlamaBody
from .writer import CompletionRenderer, settings

MAX_REPEATED = 1 << 26
"""Maximum length of what all answers to a body repeat of it, in characters or token ids. A body that is answered once
has less."""


@endpoint(LlamaCompletion, body=LlamaBody, event=LlamaCompletionEvent, error=LlamaError)
async def completion(request: Request) -> Response:
    """Complete one prompt or several, plain or streaming."""
    state = HttpState.of(request)
    body = await parse_body(request, LlamaBody)
    check_model(body.model, state.model)
    prompts = await read_prompts(request, body.prompts)
    limits = await state.engine.questions.limits(TIMEOUT_SECONDS)
    body = named(request, timed(request, body))
    plans = await state.aside.run(len(prompts) > LARGE_BATCH, lambda: plan_completion(body, prompts, state))
    shown = settings(body, plans, state.model.name, limits.context_length)
    check_repeated(prompts, shown, body.n_cmpl)
    renderer = CompletionRenderer(body, plans, shown, state.model.name)
    group = body.rid if isinstance(body.rid, str) else None
    return EngineResponse(state.engine, plans, renderer, stream=body.stream, group=group)


def plan_completion(body: LlamaBody, prompts: list[Prompt], state: HttpState) -> list[PromptPlan]:
    """Make a ``PromptPlan`` for each of ``prompts``, without sending anything. Raises ``ApiError`` 400."""
    namings = name_requests(body, [body.n_cmpl] * len(prompts), body.is_batch, state.gate)
    defaults, terms = state.model.defaults, terms_of(body, state.options)
    fields, grammar = body.sampling(), body.asked_grammar()
    return [
        PromptPlan(
            prompt=prompt,
            # If the client gives no seed, each prompt draws its own.
            sampling=sampling_params(fields, body.max_tokens, 0, body.seed, defaults, grammar=grammar),
            n=body.n_cmpl,
            rid=naming.rid,
            keep_output=body.max_tokens > 0,
            logprobs=LogprobOptions(start_len=-1, top_num=body.n_probs) if body.n_probs else None,
            bootstrap=naming.bootstrap,
            # A namespace of its own keeps a prompt from what is cached.
            extra_key=naming.extra_key if body.cache_prompt else f"uncached {naming.rid}",
            return_prompt=prompt.text is None,
            terms=terms,
        )
        for prompt, naming in zip(prompts, namings, strict=True)
    ]


def check_repeated(prompts: Sequence[Prompt], shown: Sequence[dict[str, Any]], n_cmpl: int) -> None:
    """Raise ``ApiError`` 413 if all answers repeat more than ``MAX_REPEATED`` of their body together.

    Each answer has its prompt and its settings, with stop strings and grammar. ``shown``: settings of each prompt.
    """
    own = sum(len(prompt.text or prompt.input_ids or "") for prompt in prompts)
    length = n_cmpl * (own + len(prompts) * len(orjson.dumps(shown[0])))
    if length > MAX_REPEATED:
        raise ApiError(
            413,
            f"the answers would repeat {length} characters or token ids of prompts and settings, the limit is "
            f"{MAX_REPEATED}; ask for fewer answers at a time",
        )
