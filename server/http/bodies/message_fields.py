"""Limits and content of the messages in a body."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Discriminator, Field, Tag

from .fields import MANY, ONE, one_or_many

P = TypeVar("P")
MAX_PARTS = 4096
"""Maximum number of parts in the content of one message."""
MAX_MESSAGES = 4096
TextOrParts = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[P], Field(fail_fast=True, max_length=MAX_PARTS), Tag(MANY)],
    Discriminator(one_or_many),
]
"""Content: one text, or parts of type ``P``."""
