"""Items of a conversation in OpenAI's Responses API: messages, reasoning, calls of tools and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from ..bodies.fields import MANY, ONE, Body, FieldError, one_or_many
from ..bodies.message_fields import MAX_PARTS, TextOrParts
from ..bodies.tool_fields import ToolName, decode_arguments
from ..bodies.typed import Needs, TypeName, check_type
from ..bodies.unserved import ANYTHING, IGNORED, Unserved
from .sealed import unseal

MAX_ITEMS = 16384
MESSAGE, REASONING, CALL, OUTPUT = "message", "reasoning", "function_call", "function_call_output"
NEEDS: Needs = {
    MESSAGE: ("role", "content"),
    REASONING: (),
    CALL: ("call_id", "name", "arguments"),
    OUTPUT: ("call_id", "output"),
}
INCOMPLETE = "incomplete"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ItemId = Annotated[str, Field(max_length=512)]


class ContentPart(Body):
    """A part of an item's content. Only texts are served."""

    unserved: ClassVar[Unserved] = {
        **dict.fromkeys(("annotations", "logprobs"), ANYTHING),
        "cache_control": IGNORED,
    }

    type: TypeName
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ContentPart:
        if self.type == "refusal":
            if self.refusal is None:
                raise FieldError("refusal", "is required")
        elif self.type not in TEXT_PARTS:
            raise FieldError("type", f'"{self.type}" is not served: the model reads texts only; send an "input_text"')
        elif self.text is None:
            raise FieldError("text", "is required")
        return self

    @property
    def words(self) -> str:
        """Return the part's text."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


Parts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)]
Content = TextOrParts[ContentPart]


class InputItem(Body):
    """An item of ``input``. Its type says which fields it needs; one with a ``role`` is a message by default."""

    unserved: ClassVar[Unserved] = dict.fromkeys(("id", "phase", "created_by", "namespace"), ANYTHING)

    type: TypeName = MESSAGE
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: ItemId | None = None
    """Id of a call, in the call and in its output."""
    name: ToolName | None = None
    arguments: str | None = None
    """Arguments of a call, JSON as text."""
    output: Content | None = None
    """Output of a call."""
    summary: Parts = Field(default_factory=list)
    encrypted_content: str | None = None
    status: Annotated[str, Field(max_length=64)] | None = None
    """Status that an answer gave the item. "incomplete" means that a call may have only a part of its arguments."""
    _decoded: dict[str, Any] = PrivateAttr(default_factory=dict)
    _is_broken: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _check_type(self, info: ValidationInfo) -> InputItem:
        check_type(self, self.type, NEEDS)
        if self.type == CALL:
            try:
                self._decoded = decode_arguments(self.name or "", self.arguments or "", info.context)
            except ValueError:
                if self.status != INCOMPLETE:
                    raise
                self._is_broken = True
        return self

    @property
    def is_broken(self) -> bool:
        """Whether this is a call that the model did not finish."""
        return self._is_broken

    @property
    def decoded(self) -> dict[str, Any]:
        """The arguments of a call, parsed."""
        return self._decoded

    def texts(self) -> list[str]:
        """Return the texts of a message or of a call's output, one for each part."""
        given = self.output if self.type == OUTPUT else self.content
        return [given] if isinstance(given, str) else texts_of(given or ())

    def thought(self) -> str:
        """Return the text of reasoning: its content, else what this server has sealed in it, else its summary."""
        if self.content:
            return "".join(self.texts())
        return unseal(self.encrypted_content or "") or "\n\n".join(texts_of(self.summary))


def texts_of(parts: Sequence[ContentPart]) -> list[str]:
    """Return the texts of ``parts``."""
    return [part.words for part in parts]


Items = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag(ONE)] | Annotated[Items, Tag(MANY)],
    Discriminator(one_or_many),
]
