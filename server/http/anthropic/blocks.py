"""Blocks of content in a body: text, thinking, calls of tools and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import model_validator

from ..bodies.fields import Body, FieldError
from ..bodies.message_fields import TextOrParts
from ..bodies.tool_fields import Arguments, CallId, ToolName
from ..bodies.typed import Needs, TypeName, check_type
from ..bodies.unserved import ANYTHING, IGNORED, Unserved

TOOL_CHANGES = {"tool_addition": ("tool",), "tool_removal": ("tool",)}
NEEDS: Mapping[str, Needs] = {
    "user": {"text": ("text",), "tool_result": ("tool_use_id",), "mid_conv_system": ("content",), **TOOL_CHANGES},
    "assistant": {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
    },
    "system": {"text": ("text",), **TOOL_CHANGES},
}
"""Required fields of each type of block, by the role of the message."""
RESULT_NEEDS: Needs = {"text": ("text",), "tool_reference": ("tool_name",)}
"""Required fields of each type of block within another block."""
OPTIONAL = {"tool_result": ("content", "is_error")}
FIELDS = {
    kind: frozenset(("type", *needed, *OPTIONAL.get(kind, ())))
    for needs in (*NEEDS.values(), RESULT_NEEDS)
    for kind, needed in needs.items()
}
"""Fields that a block may have, by its type."""

TEXT_BLOCK: Unserved = dict.fromkeys(("cache_control", "citations"), ANYTHING)
BLOCK: Unserved = {
    **TEXT_BLOCK,
    # What an answer's thinking and calls have, and clients send back.
    **dict.fromkeys(("signature", "caller", "toolset_name"), ANYTHING),
    "data": IGNORED,
    # Fields of images and documents, which are refused by their type.
    **dict.fromkeys(("source", "title", "context"), ANYTHING),
}


class TextBlockBody(Body):
    """A block of text in the system prompt."""

    unserved: ClassVar[Unserved] = TEXT_BLOCK

    type: Literal["text"]
    text: str


class ResultBlockBody(Body):
    """A block of a tool's result, or of system instructions within a conversation."""

    unserved: ClassVar[Unserved] = BLOCK

    type: TypeName
    text: str | None = None
    tool_name: ToolName | None = None
    """Tool that a search for tools has found."""

    @model_validator(mode="after")
    def _check_type(self) -> ResultBlockBody:
        check_block(self, RESULT_NEEDS)
        return self

    @property
    def shown(self) -> str:
        """Text for the model."""
        return self.text or self.tool_name or ""


ResultContent = TextOrParts[ResultBlockBody]


class ToolReferenceBody(Body):
    """The name of one of the request's tools."""

    type: Literal["tool_reference"]
    name: ToolName


class BlockBody(Body):
    """A block of a message. Its ``type`` says which fields it has."""

    unserved: ClassVar[Unserved] = BLOCK

    type: TypeName
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    """Id of a call."""
    name: ToolName | None = None
    input: Arguments | None = None
    """Arguments of a call."""
    tool_use_id: CallId | None = None
    """Id of the call that a result is of."""
    content: ResultContent | None = None
    is_error: bool = False
    """Whether the tool failed."""
    tool: ToolReferenceBody | None = None
    """Tool that may be called from here on, or no longer."""

    @property
    def result_texts(self) -> list[str]:
        """Texts in ``content``."""
        content = self.content or ()
        return [content] if isinstance(content, str) else [block.shown for block in content]

    @property
    def tool_changes(self) -> dict[str, bool]:
        """Names of tools, each with whether it may be called from here on."""
        if self.tool is not None:
            return {self.tool.name: self.type == "tool_addition"}
        parts = self.content if isinstance(self.content, list) else ()
        return {part.tool_name: True for part in parts if part.tool_name is not None}

    @property
    def characters(self) -> int:
        """Length of all texts and arguments of the block, in characters."""
        texts = [self.text or "", self.thinking or "", *self.result_texts]
        return sum(map(len, texts)) + (len(repr(self.input)) if self.input else 0)


def texts_of(content: str | Sequence[TextBlockBody]) -> list[str]:
    """Return the texts of ``content``, which is one text or blocks of text."""
    return [content] if isinstance(content, str) else [block.text for block in content]


def check_block(block: ResultBlockBody | BlockBody, needs: Needs, place: str = "") -> None:
    """Raise ``FieldError`` if the type of ``block`` is not served there, or if its fields are not those of its type.

    ``needs``: the types that are served there. ``place``: the block's path in its message, ending in a dot.
    """
    check_type(block, block.type, needs, place)
    if not block.model_fields_set <= FIELDS[block.type]:
        name = min(block.model_fields_set - FIELDS[block.type])
        raise FieldError(place + name, f"does not belong in a block of type {block.type}; leave it out")
