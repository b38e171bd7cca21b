"""Other ways to put the same conversation, for templates that do not print it as the client sent it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import msgspec

from ...messages.conversation import ChatMessage, Conversation

Rewrite = Callable[[Conversation], Conversation]


def as_sent(chat: Conversation) -> Conversation:
    """Return ``chat`` itself: the rewrite that changes nothing."""
    return chat


def without_reasoning(chat: Conversation) -> Conversation:
    """Return ``chat`` without reasoning in its turns. The template of gpt-oss refuses it beside content and calls."""
    return _with_messages(chat, (msgspec.structs.replace(m, reasoning_content=None) for m in chat.messages))


def split_calls(chat: Conversation) -> Conversation:
    """Return ``chat`` with two turns, text and calls, in place of each turn that has text and tool calls.

    The template of Llama 3 prints only the calls of such a turn.
    """
    # The last message is the one to continue.
    return chat if chat.continue_final_message else _with_messages(chat, _split(chat))


def pair_calls(chat: Conversation) -> Conversation:
    """Return ``chat`` with a turn for each single tool call, directly before the call's result.

    Templates of Llama 3 and gpt-oss accept only one call in a turn.
    """
    return _with_messages(chat, _pair(chat))


def name_calls_by_id(chat: Conversation) -> Conversation:
    """Return ``chat`` with ids like "functions.NAME:0" for its tool calls, counted over the conversation.

    The template of Kimi K2 prints the id, and not the name.
    """
    return _with_messages(chat, _with_telling_ids(chat))


def write_arguments(chat: Conversation) -> Conversation:
    """Return ``chat`` with the arguments of its tool calls as JSON text. The template of DeepSeek V3 needs it."""
    return _with_messages(chat, (_with_text_arguments(message) for message in chat.messages))


REWRITES: tuple[Rewrite, ...] = (
    as_sent,
    without_reasoning,
    split_calls,
    pair_calls,
    name_calls_by_id,
    write_arguments,
)
"""In the order in which they are tried."""


def _with_messages(chat: Conversation, messages: Iterator[ChatMessage]) -> Conversation:
    return msgspec.structs.replace(chat, messages=list(messages))


def _with_text_arguments(message: ChatMessage) -> ChatMessage:
    calls = [
        msgspec.structs.replace(call, arguments=json.dumps(call.arguments, ensure_ascii=False))
        for call in message.tool_calls
    ]
    return msgspec.structs.replace(message, tool_calls=calls)


def _split(chat: Conversation) -> Iterator[ChatMessage]:
    for message in chat.messages:
        if message.content and message.tool_calls:
            yield msgspec.structs.replace(message, tool_calls=[])
            yield msgspec.structs.replace(message, content=None, reasoning_content=None)
        else:
            yield message


def _pair(chat: Conversation) -> Iterator[ChatMessage]:
    at = 0
    while at < len(chat.messages):
        message = chat.messages[at]
        at += 1
        results = chat.messages[at : at + len(message.tool_calls)]
        if not results or [result.tool_call_id for result in results] != [call.id for call in message.tool_calls]:
            yield message
            continue
        at += len(results)
        for call, result in zip(message.tool_calls, results, strict=True):
            yield msgspec.structs.replace(message, tool_calls=[call])
            yield result
            message = ChatMessage("assistant", None)


def _with_telling_ids(chat: Conversation) -> Iterator[ChatMessage]:
    count, new_ids = 0, dict[str, str]()
    for message in chat.messages:
        calls = []
        for call in message.tool_calls:
            new_ids[call.id] = f"functions.{call.name}:{count}"
            calls.append(msgspec.structs.replace(call, id=new_ids[call.id]))
            count += 1
        answered = message.tool_call_id
        yield msgspec.structs.replace(
            message, tool_calls=calls, tool_call_id=None if answered is None else new_ids.get(answered, answered)
        )
