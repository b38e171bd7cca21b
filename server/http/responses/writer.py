"""Writes responses: the object itself, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
from starlette.types import Scope

from ....messages.outputs import FinishReason, FinishType
from ....runtime.web.moved_answer import Ticket
from ....runtime.web.sse import DATA_PREFIX, EVENT_END
from ..engine.engine_client import EngineClient
from ..engine.plan import PromptPlan
from ..engine.submission import Choice, Delta
from ..errors import ApiError
from ..generation.engine_response import EngineResponse, unwritten
from ..generation.output_reader import OutputReader
from .output_items import Event, OutputItems
from .schemas import ENCRYPTED_REASONING, ForcedFunction, ResponsesBody

STATUSES = {
    FinishType.STOP: "completed",
    FinishType.LENGTH: "incomplete",
    FinishType.ABORT: "cancelled",
    FinishType.TIMEOUT: "incomplete",
    FinishType.DECLINED: "incomplete",
}
FAILURE_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI's word for a failure with this status. All others are a "server_error"."""


def echo(body: ResponsesBody, plan: PromptPlan, model: str, created: int) -> dict[str, Any]:
    """Return the fields of a response that do not change while it is generated. ``model``: name that it reports."""
    sampling = plan.sampling
    return {
        "id": plan.rid,
        "object": "response",
        "created_at": created,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": _format(body)},
        "tool_choice": _tool_choice(body),
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            | {"strict": False}
            for tool in body.functions
        ],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format
    if given.type != "json_schema":
        return {"type": given.type}
    return {"type": given.type, "name": given.name, "schema": given.schema_, "strict": True}


def _tool_choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    return {"type": "function", "name": choice.name} if isinstance(choice, ForcedFunction) else choice


class ResponseWriter:
    """Writes one response. ``fields``: those that do not change, as ``echo`` returns them."""

    field_names: ClassVar[Mapping[str, str]] = dict.fromkeys(("text", "input_ids", "messages"), "input")
    repeats = False

    def __init__(
        self, fields: dict[str, Any], body: ResponsesBody, reader: OutputReader, ticket: Ticket | None = None
    ) -> None:
        self._fields = fields
        self._reader = reader
        self._items = OutputItems(fields["id"], seals=ENCRYPTED_REASONING in body.include)
        self.sent_events = ticket.events if ticket is not None else 0
        """Events that the client has been sent, by another instance, too."""

    @property
    def created(self) -> int:
        """Return the creation time that the response reports, a Unix time in whole seconds."""
        created: int = self._fields["created_at"]
        return created

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the response, JSON-ready, of its only choice, which has finished."""
        (choice,) = choices
        for event in self._reader.read_whole(choice):
            self._items.add(event)
        return self._ended(choice)[1]

    def events(self, delta: Delta) -> bytes:
        """Encode the events for what is new. The first ones say that the response has begun."""
        if delta.sent_before:
            # Another instance has sent what this text says.
            for event in self._reader.read(delta._replace(text=delta.sent_before, sent_before="", finish=None)):
                self._items.add(event)
        told: list[Event] = []
        if delta.is_first:
            begun = self._response("in_progress", output=[])
            told = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        for event in self._reader.read(delta._replace(sent_before="")):
            told += self._items.add(event)
        return self._encoded(told)

    def last_events(self, choices: list[Choice]) -> bytes:
        """Encode the events that complete the last item and the response."""
        told, response = self._ended(choices[0])
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return self._encoded([*told, {"type": kind, "response": response}])

    def failed(self, error: ApiError) -> bytes:
        """Encode the event that says that the response has failed; no bytes if it has not begun for the client."""
        if not self.sent_events:
            return b""
        code = FAILURE_CODES.get(error.status, "server_error")
        response = self._response("failed", error={"code": code, "message": error.message}, output=self._items.items)
        return self._encoded([{"type": "response.failed", "response": response}])

    def _ended(self, choice: Choice) -> tuple[list[Event], dict[str, Any]]:
        assert choice.finish is not None
        status = STATUSES[choice.finish.type]
        told = self._items.end(is_cut=status != "completed")
        ending = {"completed_at": int(time.time())} if status == "completed" else {}
        return told, self._response(
            status, **ending, **_how_ended(choice.finish), output=self._items.items, usage=usage(choice)
        )

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, **unknown, "status": status, **fields}

    def _encoded(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self.sent_events})
            parts += [b"event: ", event["type"].encode(), b"\n", DATA_PREFIX, data, EVENT_END]
            self.sent_events += 1
        return b"".join(parts)


def _how_ended(finish: FinishReason) -> dict[str, Any]:
    if finish.type is FinishType.STOP:
        return {}
    if finish.type is FinishType.LENGTH:
        return {"incomplete_details": {"reason": "max_output_tokens"}}
    return {"pdserve_finish": {"type": finish.type.value, "message": finish.message}}


def usage(choice: Choice) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object for a choice, in tokens."""
    prompt_tokens = choice.prompt_tokens or 0
    return {
        "input_tokens": prompt_tokens,
        # Nothing is charged for writing into a cache.
        "input_tokens_details": {"cached_tokens": choice.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning.tokens if choice.reasoning is not None else 0},
        "total_tokens": prompt_tokens + choice.completion_tokens,
    }


class ResponsesAnswer(EngineResponse):
    """Submits a plan, and answers with a response. Its events are numbered."""

    def __init__(self, engine: EngineClient, plan: PromptPlan, writer: ResponseWriter, *, stream: bool) -> None:
        super().__init__(engine, [plan], writer, stream=stream)
        self._writer = writer

    def sent_events(self) -> int:
        """Return the number of events that the client has been sent."""
        return self._writer.sent_events

    def failure(self, error: ApiError, scope: Scope) -> bytes:
        """Return the events of a failure: ``response.failed`` if the response has begun, and ``error``.

        If a fault of the writer is the failure, it may fail again. ``error`` alone then ends the stream.
        """
        try:
            told = self._writer.failed(error)
        except Exception as e:  # noqa: BLE001 - a writer's bug of any kind
            unwritten(e)
            told = b""
        return told + super().failure(error, scope)
