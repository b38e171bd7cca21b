"""``POST /v1/messages``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ....messages.outputs import FinishReason, FinishType
from ....runtime.web.errors import THREAD_UNSUPPORTED
from ....runtime.web.sse import EVENT_END
from ..endpoint import endpoint
from ..engine.plan import Prompt
from ..engine.submission import Choice, Delta
from ..errors import ApiError
from ..generation.answer_plan import AnswerFields, plan_answer
from ..generation.engine_response import EngineResponse
from ..generation.output_reader import OutputReader
from ..generation.request_names import named
from ..generation.request_terms import timed
from ..generation.tool_use import forced_call, make_reader
from ..parsing import parse_body
from ..served_model import check_model
from ..state import HttpState
from .answers import AnthropicErrorAnswer, MessageAnswer, MessageEvent
from .content import ContentBlocks, fold
from .conversation import FIELD_NAMES, read_answerable, tool_use_of
from .schemas import MessagesBody, ThinkingBody

NO_THREADS = "thread: this server keeps no conversations; send all messages of the conversation, without this field"
PING = {"type": "ping"}
PROGRESS_SECONDS = 15.0
"""Interval of pings while tokens come but no event can be written, as of a long call: it is written when complete.

They say how many tokens there are. So a router can tell them from keep-alives, which show no progress.
"""


@endpoint(MessageAnswer, body=MessagesBody, event=MessageEvent, error=AnthropicErrorAnswer)
async def messages(request: Request) -> Response:
    """Answer a conversation, plain or streaming."""
    state = HttpState.of(request)
    body = named(request, timed(request, await parse_body(request, MessagesBody)))
    check_model(body.model, state.model)
    if body.thread is not None:
        raise ApiError(400, NO_THREADS, param="thread", code=THREAD_UNSUPPORTED)
    use, formats = tool_use_of(body), state.model.formats
    reader = make_reader(use, formats, separates_reasoning=True)
    fields = AnswerFields(body.sampling(), body.max_tokens, grammar=forced_call(use, formats) or body.grammar())
    plan = plan_answer(state, body.with_user(), Prompt(chat=read_answerable(body)), fields, reader)
    thinking = body.thinking or ThinkingBody(type="adaptive")
    blocks = ContentBlocks(
        plan.rid,
        shows_thinking=thinking.type != "disabled",
        omits_thought=thinking.display == "omitted",
    )
    renderer = MessageRenderer(plan.rid, state.model.name, reader, blocks)
    return EngineResponse(state.engine, [plan], renderer, stream=body.stream)


class MessageRenderer:
    """Writes a message, or the events of its stream. ``rid`` is its id."""

    field_names: ClassVar[Mapping[str, str]] = FIELD_NAMES
    created, repeats = 0, False

    def __init__(self, rid: str, model: str, reader: OutputReader, blocks: ContentBlocks) -> None:
        self._rid = rid
        self._model = model
        self._reader = reader
        self._blocks = blocks
        self._wrote_at = time.monotonic()

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the message, JSON-ready, of the one choice, which has finished."""
        (choice,) = choices
        events = [*self._blocks.add(self._reader.read_whole(choice)), *self._blocks.end()]
        return self._message(choice, fold(events), self._ending(choice))

    def events(self, delta: Delta) -> bytes:
        """Encode the events for ``delta``: before the first output the message's start and a ping, then its blocks.

        If there are none, and have been none for ``PROGRESS_SECONDS``, encode a ping.
        """
        choice, opening = delta.choice, list[dict[str, Any]]()
        if delta.is_first:
            begun = self._message(choice, [], {"stop_reason": None, "stop_sequence": None})
            opening = [{"type": "message_start", "message": begun}, PING]
        read = self._reader.read_all(delta)
        # What another instance has sent opens and closes blocks here, too.
        for _ in self._blocks.add(read.sent):
            pass
        return self._written([*opening, *self._blocks.add(read.new)], choice)

    def _written(self, events: list[dict[str, Any]], choice: Choice) -> bytes:
        now = time.monotonic()
        if not events and now - self._wrote_at >= PROGRESS_SECONDS:
            events = [{**PING, "output_tokens": choice.completion_tokens}]
        if events:
            self._wrote_at = now
        return _encode(events)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Encode the end of the last block and of the message."""
        (choice,) = choices
        delta = {"type": "message_delta", "delta": self._ending(choice), "usage": usage(choice)}
        return _encode([*self._blocks.end(), delta, {"type": "message_stop"}])

    def _message(self, choice: Choice, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage(choice),
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None, "a choice ends before its message"
        return ending(choice.finish, has_calls=self._reader.has_calls(choice))


def ending(finish: FinishReason, *, has_calls: bool) -> dict[str, Any]:
    """Return how an answer ended, as fields of the message. ``has_calls``: whether the model has called a tool.

    ``pdserve_finish`` is there if Anthropic has no word for the end. ``stop_reason`` is "max_tokens" then, as the
    answer is incomplete.
    """
    if finish.type is FinishType.STOP:
        if isinstance(finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}
    fields: dict[str, Any] = {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish.type is not FinishType.LENGTH:
        fields["pdserve_finish"] = {"type": finish.type.value, "message": finish.message}
    return fields


def usage(choice: Choice) -> dict[str, Any]:
    """Return Anthropic's ``usage`` object for a choice: its tokens so far. Cached prompt tokens are counted apart."""
    cached = choice.cached_tokens or 0
    counts: dict[str, Any] = {
        "input_tokens": (choice.prompt_tokens or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": choice.completion_tokens,
    }
    if choice.reasoning is not None:
        counts["output_tokens_details"] = {"thinking_tokens": choice.reasoning.tokens}
    return counts


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    """Encode server-sent events, each with the name of its type."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + EVENT_END for event in events
    )
