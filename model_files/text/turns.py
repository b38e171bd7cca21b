"""Makes the messages that chat templates see."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ...messages.conversation import ChatMessage
from ...messages.packed_text import unpack


class ContentForm(Enum):
    """How a message's content is given to a template. Templates know strings, lists of parts, or both."""

    GIVEN = "as the client sent it"
    TEXT = "one string"
    PART = "a list of one part"


def as_given(message: ChatMessage, form: ContentForm) -> ContentForm:
    """Return ``form``, or ``GIVEN`` if the client sent the message's content in that form already."""
    content = message.content
    is_given = len(content) == 1 if isinstance(content, list) else content is not None
    sent_form = ContentForm.PART if isinstance(content, list) else ContentForm.TEXT
    return ContentForm.GIVEN if is_given and form is sent_form else form


def make_turn(message: ChatMessage, form: ContentForm) -> dict[str, Any]:
    """Make the message that a template gets. Missing fields are left out, because templates ask for defined ones."""
    turn: dict[str, Any] = {"role": message.role, **_content(message, form)}
    if message.name is not None:
        turn["name"] = message.name
    if message.reasoning_content is not None:
        # Each template knows one name: gpt-oss thinking, Solar Open reasoning, most others reasoning_content.
        thought = unpack(message.reasoning_content)
        turn |= dict.fromkeys(("thinking", "reasoning", "reasoning_content"), thought)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _content(message: ChatMessage, form: ContentForm) -> dict[str, Any]:
    content = message.content
    if form is ContentForm.GIVEN:
        if content is None:
            return {}
        if not isinstance(content, list):
            return {"content": unpack(content)}
        return {"content": [_part(unpack(text)) for text in content]}
    texts = content if isinstance(content, list) else ["" if content is None else content]
    text = "\n".join(map(unpack, texts))
    return {"content": text if form is ContentForm.TEXT else [_part(text)]}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
