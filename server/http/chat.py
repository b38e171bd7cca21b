"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...messages.outputs import TokenLogprob
from ...messages.requests import ChatMessage, LogprobOptions
from .engine_response import EngineResponse
from .errors import bad_request
from .fields import INT32_MAX
from .openai_common import Envelope, check_model, ending, plan_openai, token_name, top_with_own, usage
from .openai_schemas import ChatBody, Message
from .parsing import parse_body
from .plan import Prompt
from .state import HttpState
from .submission import Choice

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, plain or streaming."""
    state = HttpState.of(request)
    body = await parse_body(request, ChatBody)
    check_model(body.model, state.options)
    # Without a limit the answer ends where the context does; the engine shortens the number to what fits.
    max_tokens = INT32_MAX if body.token_limit is None else body.token_limit
    if body.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"{body.min_tokens} is above max_completion_tokens ({max_tokens})")
    prompt = Prompt(chat=[to_chat_message(message) for message in body.messages])
    logprobs = LogprobOptions(start_len=-1, top_num=body.top_logprobs) if body.logprobs else None
    port = state.options.disaggregation_bootstrap_port
    plans = plan_openai(body, [prompt], False, max_tokens, logprobs, port, "chatcmpl-")
    renderer = ChatRenderer(Envelope.of(body, plans, state.options), body.logprobs, body.top_logprobs)
    return EngineResponse(state.engine, plans, renderer, stream=body.stream)


def to_chat_message(message: Message) -> ChatMessage:
    """The turn as plain text; "developer" is OpenAI's newer word for "system", which chat templates don't know."""
    return ChatMessage("system" if message.role == "developer" else message.role, message.text)


class ChatRenderer:
    """Writes messages, or deltas of them."""

    field_names: ClassVar[Mapping[str, str]] = {"text": "messages", "input_ids": "messages"}

    def __init__(self, envelope: Envelope, wants_logprobs: bool, top_num: int) -> None:
        self._envelope = envelope
        self._wants_logprobs = wants_logprobs
        self._top_num = top_num
        self._opened: set[int] = set()

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        rendered = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": self._logprobs(choice.logprobs),
                **ending(choice),
            }
            for choice in choices
        ]
        return {**self._envelope.wrap(KIND, rendered), "usage": usage(choices)}

    def events(self, choice: Choice) -> bytes:
        """The role first, then what is new since the last event; none for tokens that show no text yet."""
        opening = b""
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            opening = self._chunk(choice, {"role": "assistant", "content": ""}, None, {"finish_reason": None})
        text, entries = choice.text[choice.sent_chars :], choice.logprobs[choice.sent_tokens :]
        if not (text or entries or choice.finish):
            return opening
        choice.sent_chars, choice.sent_tokens = len(choice.text), len(choice.token_ids)
        delta = {"content": text} if text else {}
        return opening + self._chunk(choice, delta, self._logprobs(entries), ending(choice))

    def last_events(self, choices: list[Choice]) -> bytes:
        """The usage, where it was asked for."""
        return self._envelope.usage_chunk(CHUNK_KIND, choices)

    def _chunk(self, choice: Choice, delta: dict[str, str], logprobs: Any, end: dict[str, Any]) -> bytes:
        return self._envelope.chunk(CHUNK_KIND, choice, {"delta": delta, "logprobs": logprobs, **end})

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {
            "content": [
                {
                    **_entry(entry.token_id, entry.logprob),
                    "top_logprobs": [_entry(*pair) for pair in top_with_own(entry)] if self._top_num else [],
                }
                for entry in entries
            ]
        }


def _entry(token_id: int, logprob: float | None) -> dict[str, Any]:
    return {"token": token_name(token_id), "logprob": logprob, "bytes": None}
