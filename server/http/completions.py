"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...messages.outputs import TokenLogprob
from ...messages.requests import LogprobOptions
from .engine_response import EngineResponse
from .errors import bad_request
from .openai_common import Envelope, check_model, ending, plan_openai, token_name, top_with_own, usage
from .openai_schemas import CompletionBody
from .parsing import parse_body
from .plan import Prompt, make_prompts
from .state import HttpState
from .submission import Choice

KIND = "text_completion"


async def completions(request: Request) -> Response:
    """Complete one prompt or a batch, plain or streaming."""
    state = HttpState.of(request)
    body = await parse_body(request, CompletionBody)
    check_model(body.model, state.options)
    if body.min_tokens > body.max_tokens:
        raise bad_request("min_tokens", f"{body.min_tokens} is above max_tokens ({body.max_tokens})")
    prompts, batch = read_prompts(body.prompt)
    wanted = body.logprobs is not None
    logprobs = LogprobOptions(start_len=0 if body.echo else -1, top_num=body.logprobs or 0) if wanted else None
    port = state.options.disaggregation_bootstrap_port
    plans = plan_openai(body, prompts, batch, body.max_tokens, logprobs, port, "cmpl-")
    echoes = [(p.text or "") if body.echo else "" for p in prompts]
    renderer = CompletionRenderer(Envelope.of(body, plans, state.options), echoes, wanted)
    group = body.rid if isinstance(body.rid, str) else None
    return EngineResponse(state.engine, plans, renderer, stream=body.stream, group=group)


def read_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the client gave a batch; raises ``ApiError`` where one is empty."""
    texts: list[str] = []
    id_lists: list[list[int]] = []
    ids: list[int] = []
    for item in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, list):
            id_lists.append(item)
        else:
            ids.append(item)
    batch = isinstance(prompt, list) and not ids
    return make_prompts("prompt", texts, [ids] if ids else id_lists), batch


class CompletionRenderer:
    """``echoes``: the text to put before each prompt's completion ("" for none, and for prompts given as ids)."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt", "input_ids": "prompt"}

    def __init__(self, envelope: Envelope, echoes: list[str], wants_logprobs: bool) -> None:
        self._envelope = envelope
        self._echoes = echoes
        self._wants_logprobs = wants_logprobs
        self._opened: set[int] = set()

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """A ``text_completion`` object."""
        rendered = [
            {
                "index": choice.index,
                "text": self._echoes[choice.prompt_index] + choice.text,
                "logprobs": self._all_logprobs(choice) if self._wants_logprobs else None,
                **ending(choice),
            }
            for choice in choices
        ]
        return {**self._envelope.wrap(KIND, rendered), "usage": usage(choices)}

    def events(self, choice: Choice) -> bytes:
        """What is new since the last event; none for tokens that show no text yet."""
        echo = self._echoes[choice.prompt_index] if choice.index not in self._opened else ""
        self._opened.add(choice.index)
        offset, text = choice.sent_chars, choice.text[choice.sent_chars :]
        entries = choice.logprobs[choice.sent_tokens :]
        if not (echo or text or entries or choice.finish):
            return b""
        choice.sent_chars, choice.sent_tokens = len(choice.text), len(choice.token_ids)
        logprobs = logprobs_object(entries, [offset] * len(entries)) if self._wants_logprobs else None
        return self._envelope.chunk(KIND, choice, {"text": echo + text, "logprobs": logprobs, **ending(choice)})

    def last_events(self, choices: list[Choice]) -> bytes:
        """The usage, where it was asked for."""
        return self._envelope.usage_chunk(KIND, choices)

    def _all_logprobs(self, choice: Choice) -> dict[str, Any]:
        prompt = (choice.meta.input_logprobs if choice.meta is not None else None) or []
        echo = len(self._echoes[choice.prompt_index])
        return logprobs_object([*prompt, *choice.logprobs], [0] * len(prompt) + [echo] * len(choice.logprobs))


def logprobs_object(entries: list[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    """OpenAI's ``logprobs``. ``offsets``: where each token's chunk begins (texts of single tokens aren't known)."""
    return {
        "tokens": [token_name(e.token_id) for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [
            {token_name(token_id): logprob for token_id, logprob in top_with_own(e)} or None for e in entries
        ],
        "text_offset": offsets,
    }
