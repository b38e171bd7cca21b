"""A conversation with numbers in place of its texts, to see which of them a chat template prints."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...messages.conversation import ChatMessage, ChatToolCall, Conversation
from ...messages.packed_text import Text

_DIGITS = 8
"""Digits that tell the numbers of one skeleton apart. A request has fewer texts than they can count."""


class Numbers:
    """Numbers that no template prints of its own accord. No filter of Jinja changes them."""

    def __init__(self) -> None:
        self._prefix = str(10**11 + secrets.randbelow(9 * 10**11))
        self._pattern = re.compile(self._prefix + rf"\d{{{_DIGITS}}}")

    def make(self, index: int) -> str:
        """Return the digits that take the place of text ``index`` of a conversation.

        Indices are taken modulo 10 to the power of ``_DIGITS``. So negative ones give digits that no text has.
        """
        return f"{self._prefix}{index % 10**_DIGITS:0{_DIGITS}}"

    def find_all(self, text: str) -> set[str]:
        """Return the numbers of ``make`` that appear in ``text``."""
        return set(self._pattern.findall(text))


@dataclass(frozen=True)
class Stand:
    """A number that stands for a text. ``what``: the text, and ``field``: its field in the request, for messages."""

    number: str
    what: str
    field: str = "messages"


class Skeleton:
    """The skeleton ``chat`` of a conversation. ``stands`` are the numbers that a template has to print."""

    def __init__(self, chat: Conversation, numbers: Numbers) -> None:
        self._numbers = numbers
        self.stands: list[Stand] = []
        messages = [
            self._reduce(message, f"messages[{i}] (role {message.role})") for i, message in enumerate(chat.messages)
        ]
        if chat.continue_final_message:
            last = set(texts_of(messages[-1]))
            self.stands = [replace(s, field="continue_final_message") if s.number in last else s for s in self.stands]
        # A second tool tells whether the template prints more than one.
        tools = None if chat.tools is None else [self._tool() for _ in chat.tools[:2]]
        self.chat = msgspec.structs.replace(chat, messages=messages, tools=tools)

    def _reduce(self, message: ChatMessage, where: str) -> ChatMessage:
        content: Text | list[Text] | None = message.content
        if isinstance(content, list):
            content = [self._shorten(text, f"part {n} of {where}") for n, text in enumerate(content)]
        elif content is not None:
            content = self._shorten(content, f"the content of {where}")
        return msgspec.structs.replace(
            message,
            content=content,
            tool_calls=[self._call(call, f"the tool calls of {where}") for call in message.tool_calls],
            # Templates leave reasoning out on purpose.
            reasoning_content="0" if message.reasoning_content else message.reasoning_content,
        )

    def _call(self, call: ChatToolCall, what: str) -> ChatToolCall:
        name = self._draw(what)
        arguments = {"a": self._draw(what)} if call.arguments else {}
        return ChatToolCall(call.id.replace(call.name, name), name, arguments)

    def _tool(self) -> dict[str, Any]:
        properties = {"a": {"type": "string", "description": "b"}}
        parameters = {"type": "object", "properties": properties, "required": ["a"]}
        name = self._draw("the tools", "tools")
        return {"type": "function", "function": {"name": name, "description": "b", "parameters": parameters}}

    def _shorten(self, text: Text, what: str) -> str:
        # An empty text can't be lost, and templates tell empty content from other.
        is_empty = not text or (isinstance(text, str) and text.isspace())
        return "" if is_empty else self._draw(what)

    def _draw(self, what: str, field: str = "messages") -> str:
        self.stands.append(Stand(self._numbers.make(len(self.stands)), what, field))
        return self.stands[-1].number


def texts_of(message: ChatMessage) -> Iterator[Text]:
    """Yield the texts of a message's content."""
    if isinstance(message.content, list):
        yield from message.content
    elif message.content is not None:
        yield message.content
