"""A conversation, as a client asks for its next turn. Imports no numpy: the process that renders templates is small."""

from __future__ import annotations

from typing import Any

import msgspec

from .packed_text import Text


class ChatToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool that the assistant made. ``arguments``: a decoded JSON object, or its text for a template."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: Text | list[Text] | None
    """A text, or the texts of its parts. None: the client sent none, as for a turn that has only tool calls."""
    name: str | None = None
    reasoning_content: Text | None = None
    tool_calls: list[ChatToolCall] = []
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """Call that a turn of role "tool" answers."""

    @property
    def content_size(self) -> int:
        """Return the length of the content: in characters, but in bytes of UTF-8 for texts that are packed."""
        content = self.content or ""
        return sum(map(len, content)) if isinstance(content, list) else len(content)


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a chat template renders. ``template_args``: its variables beyond the usual ones.

    ``add_generation_prompt``: end where the assistant begins to speak. ``continue_final_message``: end within the last
    message, which the answer goes on with. One of the two at most.
    """

    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_args: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    """Tools that the assistant may call, in OpenAI's shape."""
