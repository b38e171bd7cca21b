"""Looks for a conversation's texts in what a chat template made of it.

Templates trim texts, write them as JSON or for HTML, and take control tokens and commands ("/no_think") out of them. So
only the beginning and the end of a text are searched, without all that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from markupsafe import escape

from ...messages.conversation import ChatMessage, Conversation
from ...messages.packed_text import Text, unpack
from .errors import PromptError

EDGE_CHARACTERS = 40
"""Characters of a text's beginning, and of its end, that are searched."""
SEEN_CHARACTERS = 1 << 10
"""Characters at each end of a text in which words beside control tokens are looked for."""
NEAR_CHARACTERS = 1 << 13
"""Characters before and after the place where a text is expected that are searched first."""
_removable = re.compile(r"<[^<>\s]*>|\[/?\w+\]|(?<!\S)/\w+")
"""Control tokens and commands."""
_unwritten = re.compile(r"[\W_]+")


def check_printed(chat: Conversation, text: str, *, with_assistant: bool) -> None:
    """Raise ``PromptError`` if ``text`` lacks the beginning or end of a text of ``chat``.

    The texts are the contents of messages, arguments of tool calls and names of tools. ``with_assistant``: contents of
    the assistant's messages, too. Templates cut reasoning off their beginning, so that only their end is searched.
    """
    output = _Output(text)
    for what, field, sought, is_cut in _texts(chat, with_assistant=with_assistant):
        if not output.has(unpack(sought), is_cut=is_cut):
            raise PromptError(
                field,
                f"the model's chat template does not print all of {what}; "
                "change it, or start the server with another --chat-template",
            )


def _texts(chat: Conversation, *, with_assistant: bool) -> Iterator[tuple[str, str, Text, bool]]:
    """Yield what to name, its field in the request, the text to look for, and whether its beginning may be cut off."""
    for i, message in enumerate(chat.messages):
        where = f"messages[{i}] (role {message.role})"
        is_answer = message.role == "assistant"
        if with_assistant or not is_answer:
            for text in message.content if isinstance(message.content, list) else [message.content or ""]:
                yield f"the content of {where}", "messages", text, is_answer
        for text in _arguments(message):
            yield f"the tool calls of {where}", "messages", text, False
    for tool in chat.tools or ():
        yield "the tools", "tools", tool["function"]["name"], False


def _arguments(message: ChatMessage) -> Iterator[str]:
    """Yield the names, texts and whole numbers in the arguments of a message's calls."""
    values: list[Any] = [call.arguments for call in reversed(message.tool_calls)]
    while values:
        value = values.pop()
        # In the order in which templates print them: see ``_Searched``.
        if isinstance(value, dict):
            values += reversed([part for item in value.items() for part in item])
        elif isinstance(value, list):
            values += reversed(value)
        elif isinstance(value, str):
            yield value
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(value)


class _Searched:
    """A long text. What is looked for mostly follows each other, and is then found without searching all of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        """Where the last part was found."""

    def has_near(self, part: str, distance: int) -> bool:
        """Return whether ``part`` follows what was found last within about ``distance`` characters."""
        start = self._at + max(0, distance - NEAR_CHARACTERS)
        return self._found(self._text.find(part, start, start + 2 * NEAR_CHARACTERS))

    def has(self, part: str) -> bool:
        """Return whether the text has ``part`` anywhere."""
        return self._found(self._text.find(part))

    def _found(self, at: int) -> bool:
        if at >= 0:
            self._at = at
        return at >= 0


class _Output:
    """A rendering to search in."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._raw = _Searched(text)

    @cached_property
    def _letters(self) -> _Searched:
        return _Searched(_letters_of(self._text))

    def has(self, text: str, *, is_cut: bool) -> bool:
        """Return whether the rendering has the beginning and the end of ``text``. If ``is_cut``, the end is enough."""
        if len(text) <= EDGE_CHARACTERS and self._raw.has_near(text, 0):
            return True
        return all(self._has_edge(edge, distance) for edge, distance in list(_edges(text))[is_cut:])

    def _has_edge(self, edge: str, distance: int) -> bool:
        if self._raw.has_near(edge, distance):
            return True
        written = (edge, repr(edge), json.dumps(edge), json.dumps(edge, ensure_ascii=False), str(escape(edge)))
        forms = dict.fromkeys(map(_letters_of, written))
        return any(self._letters.has_near(form, 0) for form in forms) or any(map(self._letters.has, forms))


def _edges(text: str) -> Iterator[tuple[str, int]]:
    """Yield the first and the last words of ``text`` that are no control tokens and no commands.

    Beside each is its distance from what is looked for before it, in characters.
    """
    for part, piece, end, distance in (
        (text[:SEEN_CHARACTERS], 0, slice(EDGE_CHARACTERS), 0),
        (text[-SEEN_CHARACTERS:], -1, slice(-EDGE_CHARACTERS, None), len(text)),
    ):
        pieces = [words.strip() for words in _removable.split(part) if _letters_of(words)]
        if pieces:
            yield pieces[piece][end], distance


def _letters_of(text: str) -> str:
    return _unwritten.sub("", text).casefold()
