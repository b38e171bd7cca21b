"""The base of every request body, and the types of its fields.

A body's names are checked first (``field_names.py``), then types and ranges, here. null means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ....runtime.web.body import MAX_PROMPTS
from .unserved import Unserved

T = TypeVar("T")
MAX_PROMPT_IDS = 2**20
"""Token ids in one prompt: more than any context holds; the model's own limit is asked later."""
MAX_LEVELS = 64
MAX_FREE_VALUES = 1024
"""Maximum number of values in a free-form object, one with fields that no schema names."""
MAX_FREE_CHARACTERS = 1 << 20
"""Maximum length of its names and strings together: templates are given documents by it."""
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TAG = "|"
"""Begins the tag of a union's member: pydantic puts tags into error paths, where they must not pass for field names."""
ONE, MANY = TAG + "one", TAG + "many"


def one_or_many(value: Any) -> str:
    """Return the tag of a union's member for lists, or of the one for other values."""
    return MANY if isinstance(value, list) else ONE


def _ids_one_or_many(value: Any) -> str:
    return MANY if isinstance(value, list) and value and isinstance(value[0], list) else ONE


def _integral(value: Any) -> Any:
    """Convert a float without a fraction, such as 10.0, to an integer, as JSON Schema does.

    Return other values unchanged.
    """
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= INT64_MAX else value


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must hold printable characters only")
    return value


INTEGRAL = BeforeValidator(_integral)
"""Annotation of an integer type, after its range: accepts a float without a fraction."""
OneOrMany = Annotated[
    # Every list here fails fast and has a limit: pydantic would describe each wrong entry of a million first.
    Annotated[T, Tag(ONE)] | Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(MANY)],
    Discriminator(one_or_many),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
PromptIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]
PromptIdLists = Annotated[list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIds = Annotated[
    Annotated[PromptIds, Tag(ONE)] | Annotated[PromptIdLists, Tag(MANY)],
    Discriminator(_ids_one_or_many),
]
Rid = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_check_printable)]


def check_small(value: dict[str, Any], most_values: int = MAX_FREE_VALUES) -> dict[str, Any]:
    """Check the size of a free-form JSON object, and return it unchanged. Raises ``ValueError`` as ``count_small``."""
    count_small(value, most_values)
    return value


def count_small(value: dict[str, Any], most_values: int) -> int:
    """Return the number of values in a free-form JSON object, at all levels together.

    Raises ``ValueError`` if it has more than ``most_values`` of them, too many characters, or more levels than messages
    can have.
    """
    values = characters = 0
    level: list[Any] = [value]
    for _ in range(MAX_LEVELS + 1):
        inner: list[Any] = []
        for container in level:
            values += len(container)
            if values > most_values:
                raise ValueError(f"holds more than {most_values} values")
            if isinstance(container, dict):
                characters += sum(map(len, container))
                inner += container.values()
            else:
                inner += container
        characters += sum(len(item) for item in inner if isinstance(item, str))
        if characters > MAX_FREE_CHARACTERS:
            raise ValueError(f"holds more than {MAX_FREE_CHARACTERS} characters")
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return values
    raise ValueError(f"is nested more than {MAX_LEVELS} levels deep")


def _check_template_args(args: dict[str, Any]) -> dict[str, Any]:
    if args.get("tools"):
        raise ValueError('holds "tools"; give them in the field "tools"')
    return check_small(args)


TemplateArgs = Annotated[dict[str, Any], AfterValidator(_check_template_args)]
"""Variables for the model's chat template, but for tools, which have a field of their own."""


class FieldError(ValueError):
    """Raised by validators of a whole body if two of its fields contradict each other."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Body(BaseModel):
    """A request body, or an object inside one."""

    # Names are checked before: what is left of the others here is ignored. A body is built at its first request, 7 ms
    # for a chat. All of them would take a tenth of a second of each start.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)

    may_be_left_out: ClassVar[bool] = False
    """Whether a request without a body asks for something."""
    refuses_unknown: ClassVar[bool] = False
    """Whether an unknown field is a 400 whatever ``--unknown-fields`` says: what is left out widens this order."""
    unserved: ClassVar[Unserved] = {}
    belongs: ClassVar[Mapping[str, str]] = {}
    """Fields that are known, but in another object: name → that object."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: value for name, value in raw.items() if value is not None}

    @classmethod
    def is_ignored(cls, content: Mapping[str, Any]) -> bool:
        """Return whether an object in a list is ignored as a whole because of its ``type``, which is then reported.

        ``content``: its fields, which have not been checked.
        """
        return False

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return pydantic's JSON schema of the body, in which optional fields take null as well: it means "not given".

        Other fields are declared forbidden if the body refuses unknown ones.
        """
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        properties = schema.get("properties", {})
        for name in properties.keys() - schema.get("required", ()):
            properties[name] = _or_null(properties[name])
        if cls.refuses_unknown:
            schema["additionalProperties"] = False
        return reference


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    """Return ``field``, the JSON schema of one field, widened to take null as well; title and default stay on top."""
    null = {"type": "null"}
    if null in field.get("anyOf", ()):
        return field
    kept: JsonSchemaValue = {name: field[name] for name in ("title", "default") if name in field}
    return {"anyOf": [{name: value for name, value in field.items() if name not in kept}, null], **kept}


@cache
def named_fields(schema: type[Body]) -> Mapping[str, FieldInfo]:
    """Map the names that clients write to the fields of ``schema``."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


@cache
def inner_bodies(schema: type[Body]) -> Mapping[str, type[Body] | None]:
    """Map each field of ``schema`` to its nested schema, or that of its list items; None if it has none."""
    return {name: _body_in(field.annotation) for name, field in named_fields(schema).items()}


def _body_in(annotation: Any) -> type[Body] | None:
    """Return the first ``Body`` within a type annotation, such as the item type of a list; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    return next((body for arg in get_args(annotation) if (body := _body_in(arg)) is not None), None)
