"""``POST /completion``: llama-server's own shape."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ....messages.requests import LogprobOptions
from ..bodies.large_bodies import LARGE_BATCH
from ..endpoint import endpoint
from ..engine.plan import Prompt, PromptPlan, name_requests, sampling_params
from ..engine.repeated import check_repeated
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
    check_repeated(plans, with_text=True, more=len(orjson.dumps(shown[0])))
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
