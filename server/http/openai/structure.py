"""``response_format``, ``structured_outputs`` and the ``guided_…`` fields: what the output must match."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ....messages.grammar import Grammar
from ..bodies.fields import Body, FieldError
from ..bodies.structure import ANY_OBJECT, Source, grammars_of
from ..bodies.unserved import ANYTHING, Unserved

MAX_CHOICES = 1024
Choices = Annotated[list[Source], Field(fail_fast=True, max_length=MAX_CHOICES)]
Schema = Source | dict[str, Any]


class NamedSchema(Body):
    """``response_format.json_schema``.

    ``name``, ``description`` and ``strict`` change nothing: a schema always holds.
    """

    unserved: ClassVar[Unserved] = dict.fromkeys(("name", "description", "strict"), ANYTHING)

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """``response_format``, with SGLang's and vLLM's structural tags.

    ``schema`` of a "json_object" is llama.cpp's, and instructor's.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise FieldError("json_schema", 'must hold a "schema" if the type is "json_schema"')
        return self

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammar that this format asks for, under the name ``response_format``; {} for plain text."""
        if self.type == "json_object":
            return grammars_of({"response_format": ("json_schema", self.schema_ or ANY_OBJECT)})
        if self.type == "json_schema" and self.json_schema is not None:
            # A schema that allows anything still asks for JSON.
            return grammars_of({"response_format": ("json_schema", self.json_schema.schema_ or "{}")})
        if self.type == "structural_tag":
            tags = {"structures": self.structures, "triggers": self.triggers}
            return grammars_of({"response_format": ("structural_tag", tags)})
        return {}


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool = False
    structural_tag: Source | None = None

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammars that are given, by the field's full name, such as ``structured_outputs.regex``."""
        prefix = "structured_outputs."
        return grammars_of(
            {
                f"{prefix}json": ("json_schema", self.json_),
                f"{prefix}regex": ("regex", self.regex),
                f"{prefix}choice": ("choice", self.choice),
                f"{prefix}grammar": ("ebnf", self.grammar),
                f"{prefix}json_object": ("json_schema", ANY_OBJECT if self.json_object else None),
                f"{prefix}structural_tag": ("structural_tag", self.structural_tag),
            }
        )


class OpenAIStructure(Body):
    """What both OpenAI bodies take beside ``StructureFields``."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_json_object: bool = False

    def openai_grammars(self) -> dict[str, Grammar]:
        """Return the grammars of ``response_format``, ``structured_outputs`` and ``guided_…``, by field name.

        Fields that are not given are left out.
        """
        found = {} if self.response_format is None else self.response_format.grammars()
        found |= {} if self.structured_outputs is None else self.structured_outputs.grammars()
        return found | grammars_of(
            {
                "guided_json": ("json_schema", self.guided_json),
                "guided_regex": ("regex", self.guided_regex),
                "guided_choice": ("choice", self.guided_choice),
                "guided_grammar": ("ebnf", self.guided_grammar),
                "guided_json_object": ("json_schema", ANY_OBJECT if self.guided_json_object else None),
            }
        )
