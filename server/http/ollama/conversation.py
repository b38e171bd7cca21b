"""Converts the messages of Ollama's bodies to the conversation that the tokenizer process renders."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from ....messages.conversation import ChatMessage, ChatToolCall, Conversation
from ....messages.packed_text import pack
from .schemas import OllamaChatBody, OllamaGenerateBody, OllamaMessage

CALL_ID = "call{:05d}"
"""Id of a call without one, by its position among the conversation's calls. Mistral's templates want 9 characters."""


class CallIds:
    """Ids of a conversation's tool calls. Most of Ollama's clients send none, and some templates need them.

    Thousands of turns may answer thousands of calls, so no call is looked at more than a few times.
    """

    def __init__(self) -> None:
        self._calls: list[ChatToolCall] = []
        self._answered: set[int] = set()
        """Positions in ``_calls``, as in the following."""
        self._by_name: defaultdict[str | None, deque[int]] = defaultdict(deque)
        """Calls of each tool, and under None all calls, in order. Those before the first open one may be gone."""
        self._open_by_id: defaultdict[str, list[int]] = defaultdict(list)

    def calls_of(self, message: OllamaMessage) -> list[ChatToolCall]:
        """Return the calls of an assistant's turn, all with ids."""
        calls = []
        for call in message.tool_calls:
            number = len(self._calls)
            call_id, name = call.id or CALL_ID.format(number), call.function.name
            calls.append(ChatToolCall(call_id, name, call.function.arguments))
            self._calls.append(calls[-1])
            self._open_by_id[call_id].append(number)
            self._by_name[name].append(number)
            self._by_name[None].append(number)
        return calls

    def answered_by(self, message: OllamaMessage) -> str | None:
        """Return the id of the call that a turn of role "tool" answers; None if there is no call without an answer.

        Without an id of its own, it answers the first open call of its tool, or the first one of all.
        """
        if message.tool_call_id is not None:
            self._answered.update(self._open_by_id.pop(message.tool_call_id, ()))
            return message.tool_call_id
        for name in (message.tool_name, None):
            calls = self._by_name[name]
            while calls and calls[0] in self._answered:
                calls.popleft()
            if calls:
                self._answered.add(calls[0])
                return self._calls[calls[0]].id
        return None


def chat_of(body: OllamaChatBody) -> Conversation:
    """Convert the messages and tools of ``body`` to the conversation that the chat template renders."""
    tools = body.tools_for_template or None
    return Conversation(_turns(body.messages), template_args=body.template_args, tools=tools)


def prompt_chat(body: OllamaGenerateBody) -> Conversation:
    """Convert the prompt of ``body``, and its system prompt if there is one, to a conversation."""
    system = [ChatMessage("system", pack(body.system))] if body.system else []
    return Conversation([*system, ChatMessage("user", pack(body.prompt))], template_args=body.template_args)


def _turns(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    ids = CallIds()
    return [_turn(message, ids) for message in messages]


def _turn(message: OllamaMessage, ids: CallIds) -> ChatMessage:
    calls = ids.calls_of(message)
    return ChatMessage(
        message.role,
        # Clients send an empty content with calls, which other APIs leave out.
        None if calls and not message.content else pack(message.content),
        message.tool_name,
        None if message.thinking is None else pack(message.thinking),
        calls,
        ids.answered_by(message) if message.role == "tool" else None,
    )
