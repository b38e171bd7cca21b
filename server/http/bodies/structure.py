"""Fields that say what the output must match, as OpenAI, SGLang and vLLM name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator

from ....messages.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from .fields import Body, FieldError

Source = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]
MAX_LEVELS = 254
"""Maximum levels of objects and lists that can be written as JSON."""
ANY_OBJECT = '{"type": "object"}'


class StructureFields(Body):
    """What the output must match. At most one may be given; "" is none."""

    json_schema: Source | dict[str, Any] | None = None
    regex: Source | None = None
    ebnf: Source | None = None
    structural_tag: Source | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_structure(self) -> StructureFields:
        self.grammar()
        return self

    def grammar(self) -> Grammar | None:
        """Return what the output must match; None: anything. Raises ``FieldError`` if two fields are given."""
        return one_grammar(self.grammars())

    def grammars(self) -> dict[str, Grammar]:
        """Return the grammars that the body asks for, by field name.

        Fields that are not given, or empty, ask for none.
        """
        return grammars_of(
            {
                "json_schema": ("json_schema", self.json_schema),
                "regex": ("regex", self.regex),
                "ebnf": ("ebnf", self.ebnf),
                "structural_tag": ("structural_tag", self.structural_tag),
            }
        )


def grammars_of(given: Mapping[str, tuple[Any, Any]]) -> dict[str, Grammar]:
    """Make a ``Grammar`` of each field that asks for one, and return them by field name.

    ``given``: field name → (kind of grammar, value). A value of None, "", {} or [] asks for nothing, and one that is no
    string is written as JSON. Raises ``FieldError`` if that is too long, or nested too deeply.
    """
    return {
        field: Grammar(kind, value if isinstance(value, str) else _dumped(field, value), field)
        for field, (kind, value) in given.items()
        if value not in (None, "", {}, [])
    }


def one_grammar(found: Mapping[str, Grammar]) -> Grammar | None:
    """Return the only grammar in ``found`` (by field name), None if it is empty. Raises ``FieldError`` for several."""
    if len(found) > 1:
        first, second = list(found)[:2]
        raise FieldError(second, f"can't go with {first}; give one of them")
    return next(iter(found.values()), None)


def _dumped(field: str, value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        raise FieldError(field, f"is nested more than {MAX_LEVELS} levels deep") from None
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise FieldError(field, f"has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}")
    return text
