"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ....messages.outputs import NamedLogprob
from ....messages.requests import LogprobOptions
from ..bodies.large_bodies import LARGE_BATCH
from ..endpoint import endpoint
from ..engine.plan import Prompt, make_prompts
from ..engine.submission import Choice, Delta
from ..errors import bad_request
from ..generation.engine_response import EngineResponse
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..generation.tickets import ticket_of
from ..parsing import parse_body
from ..state import HttpState
from .answers import CompletionAnswer
from .common import Envelope, EnvelopeRenderer, TokenNames, check_model, ending, plan_openai, top_with_own, usage
from .schemas import CompletionBody

KIND = "text_completion"


@endpoint(CompletionAnswer, body=CompletionBody, event=CompletionAnswer)
async def completions(request: Request) -> Response:
    """Complete one prompt or a batch, plain or streaming."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, CompletionBody)))
    check_model(body.model, state.model)
    if body.min_tokens > body.max_tokens:
        raise bad_request("min_tokens", f"{body.min_tokens} is above max_tokens ({body.max_tokens})")
    prompts, batch = read_prompts(body.prompt)
    wanted = body.logprobs is not None
    logprobs = LogprobOptions(start_len=0 if body.echo else -1, top_num=body.logprobs or 0) if wanted else None
    plans = await state.aside.run(
        len(prompts) > LARGE_BATCH,
        lambda: plan_openai(body, prompts, batch, body.max_tokens, logprobs, state, echo=body.echo),
    )
    names = TokenNames(body.return_tokens_as_token_ids) if wanted else None
    echoes = [prompt.text for prompt in prompts] if body.echo else None
    renderer = CompletionRenderer(Envelope.of(body, plans, state.model, ticket_of(request.scope)), echoes, names)
    group = body.rid if isinstance(body.rid, str) else None
    return EngineResponse(state.engine, plans, renderer, stream=body.stream, group=group)


def read_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the client gave a batch. Raises ``ApiError`` if one is empty."""
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


class CompletionRenderer(EnvelopeRenderer):
    """Writes completions. ``names`` is None if no logprobs are wanted.

    ``echoes``: the text of each prompt, to put before its completions; None in it means the text of its token ids.
    """

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt", "input_ids": "prompt"}

    def __init__(self, envelope: Envelope, echoes: list[str | None] | None, names: TokenNames | None) -> None:
        super().__init__(envelope, names)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        """Offset of each choice's next token in its text, prompt included."""

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return a ``text_completion`` object."""
        rendered = [
            {
                "index": choice.index,
                "text": self._echo(choice) + choice.text,
                "logprobs": self._logprobs(choice, choice.logprobs, with_prompt=True),
                **ending(choice.finish),
                **self._envelope.ids(choice.token_ids),
                **self._prompt_ids(choice),
            }
            for choice in choices
        ]
        return {**self._envelope.wrap(KIND, rendered), "usage": usage(choices)}

    def events(self, delta: Delta) -> bytes:
        """Return what is new since the last event; nothing for tokens that show no text yet."""
        choice = delta.choice
        echo = self._echo(choice) if delta.is_first else ""
        if not (echo or delta.text or delta.logprobs or delta.finish or self._envelope.token_ids):
            return b""
        fields = {
            "text": echo + delta.text,
            "logprobs": self._logprobs(choice, delta.logprobs, with_prompt=delta.is_first),
            **ending(delta.finish),
            **self._envelope.ids(delta.token_ids),
            **(self._prompt_ids(choice) if delta.is_first else {}),
        }
        return self._envelope.chunk(KIND, choice, fields)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the usage chunk if it was asked for, else nothing."""
        return self._envelope.usage_chunk(KIND, choices)

    def _echo(self, choice: Choice) -> str:
        if self._echoes is None:
            return ""
        text = self._echoes[choice.prompt_index]
        if text is None and choice.prompt is not None:
            return choice.prompt.text
        return text or ""

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        if not self._envelope.token_ids or choice.prompt is None:
            return {}
        return {"prompt_token_ids": choice.prompt.token_ids}

    def _logprobs(self, choice: Choice, entries: list[NamedLogprob], *, with_prompt: bool) -> dict[str, Any] | None:
        if self._names is None:
            return None
        echo = self._echo(choice)
        prompt = (choice.prompt.logprobs or []) if with_prompt and choice.prompt is not None else []
        offsets = _offsets(prompt, 0, len(echo))
        start = self._offsets.get(choice.index)
        if start is None:
            # An answer that began at another instance: what was sent from there comes before.
            start = len(echo) + choice.told_logprob_chars
            if choice.keeps_told:
                start += sum(entry.chars for entry in choice.logprobs)
            start -= sum(entry.chars for entry in entries)
        # Before the end, text that is held back may be longer than what is shown.
        end = start + sum(entry.chars for entry in entries) if choice.finish is None else len(echo) + choice.chars
        offsets += _offsets(entries, start, end)
        self._offsets[choice.index] = start + sum(entry.chars for entry in entries)
        return logprobs_object([*prompt, *entries], offsets, self._names)


def _offsets(entries: list[NamedLogprob], start: int, end: int) -> list[int]:
    """Return where each entry's token begins in a text that ends at ``end``: a stop string may have cut it."""
    offsets = []
    for entry in entries:
        offsets.append(min(start, end))
        start += entry.chars
    return offsets


def logprobs_object(entries: list[NamedLogprob], offsets: list[int], names: TokenNames) -> dict[str, Any]:
    """Return OpenAI's ``logprobs`` object. ``offsets``: characters of the choice's text before each token."""
    return {
        "tokens": [names.name(e.token_id, e.data) for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [_alternatives(e, names) for e in entries],
        "text_offset": offsets,
    }


def _alternatives(entry: NamedLogprob, names: TokenNames) -> dict[str, float] | None:
    """Return the alternatives by name; of tokens with the same text, the most probable one counts."""
    alternatives: dict[str, float] = {}
    for token_id, logprob, data in top_with_own(entry):
        alternatives.setdefault(names.name(token_id, data), logprob)
    return alternatives or None
