"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

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
from ..served_model import check_model
from ..state import HttpState
from .answers import CompletionAnswer
from .common import Envelope, EnvelopeRenderer, ending, plan_openai, usage
from .logprobs import LogprobsWriter, completion_logprobs
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
    echo = PromptEcho(prompts).text if body.echo else no_echo
    logprobs = completion_logprobs(body, echo)
    plans = await state.aside.run(
        len(prompts) > LARGE_BATCH,
        lambda: plan_openai(body, prompts, batch, body.max_tokens, logprobs.options, state, echo=body.echo),
    )
    renderer = CompletionRenderer(Envelope.of(body, plans, state.model, ticket_of(request.scope)), logprobs, echo)
    group = body.rid if isinstance(body.rid, str) else None
    return EngineResponse(state.engine, plans, renderer, stream=body.stream, group=group)


def read_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], field: str = "prompt"
) -> tuple[list[Prompt], bool]:
    """Return the prompts of the body's ``field``, and whether it is a batch. Raises ``ApiError`` 400 if one is empty.

    A single list of token ids is one prompt, and no batch.
    """
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
    return make_prompts(field, texts, [ids] if ids else id_lists), batch


class PromptEcho:
    """The prompts' texts, to put before their completions."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._texts = [prompt.text for prompt in prompts]

    def text(self, choice: Choice) -> str:
        """Return the text of a choice's prompt.

        For token ids it comes from the engine with the first output; "" until then.
        """
        text = self._texts[choice.prompt_index]
        if text is None and choice.prompt is not None:
            return choice.prompt.text
        return text or ""


def no_echo(choice: Choice) -> str:
    """Return an empty string: the answer does not repeat its prompt."""
    return ""


class CompletionRenderer(EnvelopeRenderer):
    """Writes completions. ``echo`` returns what comes before a choice's text."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "prompt", "input_ids": "prompt"}

    def __init__(self, envelope: Envelope, logprobs: LogprobsWriter, echo: Callable[[Choice], str]) -> None:
        super().__init__(envelope, logprobs)
        self._echo = echo

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return a ``text_completion`` object, JSON-ready, of all ``choices``, which have finished."""
        rendered = [
            {
                "index": choice.index,
                "text": self._echo(choice) + choice.text,
                "logprobs": self._logprobs(choice, choice.logprobs, True),
                **ending(choice.finish),
                **self._envelope.ids(choice.token_ids),
                **self._envelope.prompt_ids(choice),
            }
            for choice in choices
        ]
        return {**self._envelope.wrap(KIND, rendered), "usage": usage(choices)}

    def events(self, delta: Delta) -> bytes:
        """Encode the chunk with what is new of a choice, its first one after the echoed prompt.

        Return no bytes for tokens that show no text yet.
        """
        choice = delta.choice
        echo = self._echo(choice) if delta.is_first else ""
        if not (echo or delta.text or delta.logprobs or delta.finish or self._envelope.token_ids):
            return b""
        fields = {
            "text": echo + delta.text,
            "logprobs": self._logprobs(choice, delta.logprobs, delta.is_first),
            **ending(delta.finish),
            **self._envelope.ids(delta.token_ids),
            **(self._envelope.prompt_ids(choice) if delta.is_first else {}),
        }
        return self._envelope.chunk(KIND, choice, fields)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the encoded usage chunk if the client asked for it, else no bytes."""
        return self._envelope.usage_chunk(KIND, choices)
