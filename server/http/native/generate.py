"""``POST /generate``: SGLang's native API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....messages.outputs import FinishReason, FinishType, ReqMeta
from ....messages.requests import LogprobOptions
from ....model_files.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from ..bodies.large_bodies import LARGE_BATCH
from ..endpoint import endpoint
from ..engine.bootstrap_gate import BootstrapGate
from ..engine.plan import NO_TERMS, PromptPlan, Terms, make_prompts, name_requests, per_prompt, sampling_params
from ..engine.repeated import check_repeated
from ..engine.submission import Choice, Delta
from ..errors import bad_request
from ..generation.engine_response import EngineResponse, event
from ..generation.request_names import named
from ..generation.request_terms import terms_of, timed
from ..generation.timing import timing
from ..parsing import parse_body
from ..state import HttpState
from .answers import GenerateAnswer, Generated
from .logprob_lists import LogprobLists
from .schemas import GenerateBody


@endpoint(GenerateAnswer, body=GenerateBody, event=Generated)
async def generate(request: Request) -> Response:
    """Generate from one prompt or a batch, plain or streaming."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, GenerateBody)))
    batch = is_batch(body)
    terms = terms_of(body, state.options)
    plans = await state.aside.run(
        batch and len(body.text or body.input_ids or ()) > LARGE_BATCH,
        lambda: plan_generate(body, batch, state.gate, state.model.defaults, terms),
    )
    group = body.rid if isinstance(body.rid, str) else None
    incremental = state.options.incremental_streaming_output if body.incremental is None else body.incremental
    renderer = NativeRenderer(
        plans,
        as_list=batch or plans[0].n > 1,
        incremental=incremental,
        texts=body.return_text_in_logprobs,
        prompt_ids=body.return_prompt_token_ids,
    )
    return EngineResponse(state.engine, plans, renderer, stream=body.stream, group=group)


def is_batch(body: GenerateBody) -> bool:
    """Return whether the body holds a list of prompts (the answer is a list then, even of one)."""
    if body.input_ids is not None:
        return bool(body.input_ids) and isinstance(body.input_ids[0], list)
    return isinstance(body.text, list)


def plan_generate(
    body: GenerateBody,
    batch: bool,
    gate: BootstrapGate,
    defaults: SamplingDefaults = NO_DEFAULTS,
    terms: Terms = NO_TERMS,
) -> list[PromptPlan]:
    """Make a ``PromptPlan`` for each prompt of the body, without sending anything. Raises ``ApiError`` (400, 413).

    ``batch``: whether the body holds a list of prompts. ``gate``: decides which bootstrap addresses may be followed.
    ``defaults``: sampling values for what the client left out. ``terms``: priority, time limit and user.
    """
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("text" if body.text is None else "input_ids", 'give exactly one of "text" and "input_ids"')
    if body.text is not None:
        prompts = make_prompts("text", [body.text] if isinstance(body.text, str) else body.text, None)
    else:
        prompts = make_prompts("input_ids", None, body.input_ids if batch else [body.input_ids])  # type: ignore[arg-type,list-item]
    size = len(prompts)
    samplings = per_prompt("sampling_params", body.sampling_params, size, batch)
    wanted = per_prompt("return_logprob", body.return_logprob, size, batch)
    tops = per_prompt("top_logprobs_num", body.top_logprobs_num, size, batch)
    starts = per_prompt("logprob_start_len", body.logprob_start_len, size, batch)
    namings = name_requests(body, [s.n for s in samplings], batch, gate)
    plans = [
        PromptPlan(
            prompt=prompts[i],
            sampling=sampling_params(s, s.max_new_tokens, s.min_new_tokens, s.sampling_seed, defaults),
            n=s.n,
            rid=namings[i].rid,
            keep_output=s.max_new_tokens > 0,
            logprobs=LogprobOptions(start_len=starts[i], top_num=tops[i]) if wanted[i] else None,
            bootstrap=namings[i].bootstrap,
            extra_key=namings[i].extra_key,
            return_prompt=body.return_prompt_token_ids,
            terms=terms,
        )
        for i, s in enumerate(samplings)
    ]
    check_repeated(plans, with_text=False)
    return plans


SAMPLING_NAMES = {
    **{name: f"sampling_params.{name}" for name in ("stop", "stop_token_ids", "logit_bias")},
    "logprobs": "top_logprobs_num",
}
"""Clients' names of the fields that the tokenizer process checks."""


class NativeRenderer:
    """Writes objects of text, output_ids and meta_info; in a stream with ``index`` if there are several.

    A stream's objects hold everything so far, or what is new (``incremental``); counts are of everything either way.
    """

    def __init__(
        self,
        plans: list[PromptPlan],
        *,
        as_list: bool,
        incremental: bool = False,
        texts: bool = False,
        prompt_ids: bool = False,
        prompt_lens: list[int | None] | None = None,
    ) -> None:
        self._logprobs = [plan.logprobs for plan in plans]
        self._incremental = incremental
        self._texts = texts
        self._prompt_ids = prompt_ids
        self._lists: dict[int, LogprobLists] = {}
        known = [None if p.prompt.input_ids is None else len(p.prompt.input_ids) for p in plans]
        self._prompt_lens = known if prompt_lens is None else prompt_lens
        self._as_list = as_list
        self.field_names = SAMPLING_NAMES | ({"input_ids": "text"} if plans[0].prompt.text is not None else {})

    @property
    def created(self) -> int:
        """Return 0: answers of ``/generate`` have no creation time."""
        return 0

    @property
    def repeats(self) -> bool:
        """Return whether each event of a stream holds the whole output so far, and not only what is new."""
        return not self._incremental

    def answer(self, choices: list[Choice]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the object of the only choice, or a list of objects if the body held a list or wants several."""
        answers = [self._render(choice, None) for choice in choices]
        return answers if self._as_list else answers[0]

    def events(self, delta: Delta) -> bytes:
        """Encode one event: the choice's output so far, or what is new of it if the stream is incremental."""
        content = self._render(delta.choice, delta if self._incremental else None)
        if self._as_list:
            content["index"] = delta.choice.index
        return event(content)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return no bytes: no event follows the last choice's end."""
        return b""

    def _render(self, choice: Choice, delta: Delta | None) -> dict[str, Any]:
        """Return the object of ``choice`` with ``text``, ``output_ids`` and ``meta_info``.

        With a ``delta``, it has only the text, tokens and log-probabilities that are new. Without one, it has all so
        far.
        """
        meta_info: dict[str, Any] = {
            "id": choice.rid,
            "finish_reason": finish_reason(choice.finish, choice.completion_tokens),
            "prompt_tokens": choice.prompt_tokens or self._prompt_lens[choice.prompt_index],
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
        }
        if choice.finish is not None:
            meta_info["e2e_latency"] = round(choice.seconds, 6)
        if choice.meta is not None and choice.finish is not None:
            meta_info["retractions"] = choice.meta.retractions
            meta_info["timing"] = timing(choice.meta.timing, choice.seconds)
        if choice.meta is not None and choice.meta.cached_beyond is not None:
            meta_info["cached_tokens_details"] = by_tier(choice.meta)
        options = self._logprobs[choice.prompt_index]
        if options is not None:
            lists = self._lists.get(choice.index)
            if lists is None or delta is not None:
                # Nothing is sent twice: a new set of lists writes only this delta's entries.
                lists = self._lists[choice.index] = LogprobLists(top=bool(options.top_num), texts=self._texts)
            if delta is None:
                meta_info |= lists.upto(choice.prompt, choice.logprobs)
            else:
                meta_info |= lists.upto(choice.prompt if delta.is_first else None, delta.logprobs)
        if self._prompt_ids and choice.prompt is not None and (delta is None or delta.is_first):
            meta_info["prompt_token_ids"] = choice.prompt.token_ids
        new = choice if delta is None else delta
        return {"text": new.text, "output_ids": new.token_ids, "meta_info": meta_info}


def by_tier(meta: ReqMeta) -> dict[str, Any]:
    """Return how many cached prompt tokens each tier held, in SGLang's names; the sum is ``cached_tokens``.

    ``decode``: tiers in which a decode instance found the tokens that were not handed over.
    """
    assert meta.cached_beyond is not None
    # The counts may come from another instance, and need not be right.
    host, storage = meta.cached_beyond.host, meta.cached_beyond.store
    tokens: dict[str, Any] = {"device": max(0, meta.cached_tokens - host - storage), "host": host, "storage": storage}
    if (held := meta.held) is not None:
        tokens["decode"] = {"device": held.device, "host": held.host, "storage": held.store}
    return tokens


def finish_reason(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    """Return why an answer ended, in SGLang's shape, or None if it has not ended.

    ``type`` comes with ``matched`` ("stop"), ``length`` in tokens, or ``message`` (any other type).
    """
    if finish is None:
        return None
    if finish.type is FinishType.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.type is FinishType.LENGTH:
        return {"type": "length", "length": completion_tokens}
    return {"type": finish.type.value, "message": finish.message}
