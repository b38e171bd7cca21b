"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ....messages.conversation import Conversation
from ..bodies.fields import INT32_MAX
from ..endpoint import endpoint
from ..engine.plan import Prompt
from ..engine.submission import Choice, Delta
from ..errors import bad_request
from ..generation.engine_response import EngineResponse
from ..generation.output_reader import OutputReader
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..generation.tickets import ticket_of
from ..generation.tool_use import forced_call, make_reader
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import ChatAnswer, ChatChunk
from .common import Envelope, EnvelopeRenderer, ending, plan_openai, usage
from .conversation import read_conversation
from .logprobs import LogprobsWriter, chat_logprobs
from .message_parts import MessageParts, tool_use_of
from .schemas import ChatBody

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


@endpoint(ChatAnswer, body=ChatBody, event=ChatChunk)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, plain or streaming."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, ChatBody)))
    check_model(body.model, state.model)
    # Without a limit the answer ends with the context: the engine lowers the number to what fits.
    max_tokens = INT32_MAX if body.token_limit is None else body.token_limit
    if body.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"{body.min_tokens} is above max_completion_tokens ({max_tokens})")
    logprobs, use, formats = chat_logprobs(body), tool_use_of(body), state.model.formats
    separates = body.separate_reasoning or not body.include_reasoning
    reader, forced = make_reader(use, formats, separates_reasoning=separates), forced_call(use, formats)
    prompts = [Prompt(chat=chat_of(body))]
    plans = plan_openai(body, prompts, False, max_tokens, logprobs.options, state, marks=reader.marks, grammar=forced)
    envelope = Envelope.of(body, plans, state.model, ticket_of(request.scope))
    parts = MessageParts(envelope.id, includes_reasoning=body.include_reasoning)
    renderer = ChatCompletionRenderer(envelope, logprobs, reader, parts)
    return EngineResponse(state.engine, plans, renderer, stream=body.stream)


def chat_of(body: ChatBody) -> Conversation:
    """Convert the body's messages, tools and template arguments to the conversation that the chat template renders.

    Tools are left out if ``tool_choice`` is "none".
    """
    args = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        args.setdefault("reasoning_effort", body.reasoning_effort)
    tools = body.tools if body.tool_choice != "none" else ()
    return read_conversation(body.messages, body.add_generation_prompt, body.continue_final_message, args, tools)


class ChatCompletionRenderer(EnvelopeRenderer):
    """Writes messages, or deltas of them."""

    def __init__(self, envelope: Envelope, logprobs: LogprobsWriter, reader: OutputReader, parts: MessageParts) -> None:
        super().__init__(envelope, logprobs)
        self._reader = reader
        self._parts = parts

    field_names: ClassVar[Mapping[str, str]] = {"text": "messages", "input_ids": "messages", "logprobs": "top_logprobs"}

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return a ``chat.completion`` object, JSON-ready, of all ``choices``, which have finished."""
        rendered = [
            {
                "index": choice.index,
                "message": self._parts.whole(choice, self._reader.read_whole(choice)),
                "logprobs": self._logprobs(choice, choice.logprobs, True),
                **ending(choice.finish, has_calls=self._reader.has_calls(choice)),
                **self._envelope.ids(choice.token_ids),
            }
            for choice in choices
        ]
        return {**self._envelope.wrap(KIND, rendered), **self._envelope.prompt_ids(choices[0]), "usage": usage(choices)}

    def events(self, delta: Delta) -> bytes:
        """Encode the chunks for ``delta``: one with the role before a choice's first output, and one with what is new.

        The second one is left out for tokens that show no text yet.
        """
        choice, opening = delta.choice, b""
        if delta.is_first:
            start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            opening = self._envelope.chunk(CHUNK_KIND, choice, start, self._envelope.prompt_ids(choice))
        parts = self._parts.new(choice, self._reader.read(delta))
        if not (parts or delta.logprobs or delta.finish or self._envelope.token_ids):
            return opening
        fields = {
            "delta": parts,
            "logprobs": self._logprobs(choice, delta.logprobs, delta.is_first),
            **ending(delta.finish, has_calls=self._reader.has_calls(choice)),
            **self._envelope.ids(delta.token_ids),
        }
        return opening + self._envelope.chunk(CHUNK_KIND, choice, fields)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the encoded usage chunk if the client asked for it, else no bytes."""
        return self._envelope.usage_chunk(CHUNK_KIND, choices)
