"""The base of every request body: strict types, and no field that is not known.

A body is checked in this order: unknown fields (with the nearest known name), fields that are not served, then types
and ranges. null means "not given" everywhere. Fields that are accepted though nothing comes of them are told to the
``Ignored`` of the validation's context.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, model_validator

from ...messages.decode import shown
from .errors import bad_request
from .unserved import IGNORED, Unserved, is_neutral

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_PROMPTS = 4096
"""In one body, and entries of the lists that go with them."""
MAX_PROMPT_IDS = 2**20
"""Token ids in one prompt: more than any context holds; the model's own limit is asked later."""
MAX_LEVELS = 64
MAX_SHOWN_NAME = 64
"""Characters of an unknown field's name that its refusal repeats."""
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TAG = "|"
"""Begins the tag of a union's member: pydantic puts tags into error paths, where they must not pass for field names."""
ONE, MANY = TAG + "one", TAG + "many"

ELSEWHERE: Mapping[str, str] = {
    "seed": "sampling_seed",
    "sampling_seed": "seed",
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_tokens",
    "prompt": "text",
    "inputs": "text",
    "text": "prompt",
    "parameters": "sampling_params",
    "logprobs": "return_logprob",
}
"""What a field is called in a neighbouring API, where the spelling alone would not lead there."""


def _one_or_many(value: Any) -> str:
    return MANY if isinstance(value, list) else ONE


def _ids_one_or_many(value: Any) -> str:
    return MANY if isinstance(value, list) and value and isinstance(value[0], list) else ONE


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must hold printable characters only")
    return value


OneOrMany = Annotated[
    # Every list here fails fast and has a limit: pydantic would describe each wrong entry of a million first.
    Annotated[T, Tag(ONE)] | Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag(MANY)],
    Discriminator(_one_or_many),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
PromptIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]
PromptIdLists = Annotated[list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIds = Annotated[
    Annotated[PromptIds, Tag(ONE)] | Annotated[PromptIdLists, Tag(MANY)],
    Discriminator(_ids_one_or_many),
]
Rid = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_check_printable)]


def check_shallow(value: Any, levels: int = MAX_LEVELS) -> Any:
    """``value``; raises ``ValueError`` where it is nested deeper than messages between processes can be."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if levels == 0:
            raise ValueError(f"is nested more than {MAX_LEVELS} levels deep")
        check_shallow(item, levels - 1)
    return value


Shallow = Annotated[dict[str, Any], AfterValidator(check_shallow)]
"""An object whose inside is not ours to know."""


class Ignored:
    """Logs each field that is accepted and ignored, once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def note(self, path: str) -> None:
        """A client sent this field. Paths are those of ``unserved.py``, so there are only so many."""
        if path not in self._told:
            self._told.add(path)
            log.info("clients send %s, which is accepted and ignored here", path)


class Body(BaseModel):
    """A request body, or an object inside one (then ``path`` says where, for error messages)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    path: ClassVar[str] = ""
    may_be_left_out: ClassVar[bool] = False
    """Whether a request without a body asks for something."""
    unserved: ClassVar[Unserved] = {}
    belongs: ClassVar[Mapping[str, str]] = {}
    """Fields that are known, but in another object: name → that object."""

    @classmethod
    def at(cls, name: str) -> str:
        """The path of field ``name``."""
        return f"{cls.path}.{name}" if cls.path else name

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, raw: Any, info: ValidationInfo) -> Any:
        if not isinstance(raw, dict):
            return raw
        for name, value in raw.items():
            if name in cls.model_fields:
                continue
            if name not in cls.unserved:
                raise bad_request(cls.at(shown(name, MAX_SHOWN_NAME)), f"there is no such field{cls._hint(name)}")
            neutral = cls.unserved[name]
            if not is_neutral(value, neutral):
                raise bad_request(cls.at(name), "this server does not serve this field; leave it out")
            if neutral is IGNORED and value is not None and isinstance(info.context, Ignored):
                info.context.note(cls.at(name))
        return {name: value for name, value in raw.items() if value is not None and name in cls.model_fields}

    @classmethod
    def _hint(cls, name: str) -> str:
        if name in cls.belongs:
            return f'; it belongs in "{cls.belongs[name]}"'
        known = cls.model_fields.keys()
        if len(name) > MAX_SHOWN_NAME:
            return ""
        near = [other] if (other := ELSEWHERE.get(name)) in known else difflib.get_close_matches(name, known, 1)
        return f'; did you mean "{near[0]}"?' if near else ""
