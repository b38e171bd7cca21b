"""Checks of objects with a ``type`` that says which fields are needed: items, blocks of content, and tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from ....messages.decode import shown
from .fields import Body, FieldError

Needs = Mapping[str, tuple[str, ...]]
"""Required fields of each type that is served."""
MAX_TYPE = 64
"""Maximum length of a type, in characters."""
TypeName = Annotated[str, Field(max_length=MAX_TYPE)]


def check_type(given: Body, kind: str, needs: Needs, place: str = "") -> None:
    """Raise ``FieldError`` if ``needs`` does not have the type ``kind``, or if ``given`` lacks a field that it needs.

    ``place``: path of ``given`` in the body that raises it, ending in a dot.
    """
    if kind not in needs:
        types = ", ".join(needs)
        raise FieldError(f"{place}type", f'"{shown(kind, MAX_TYPE)}" is not served here; the types are {types}')
    check_required(given, kind, needs[kind], place)


def check_required(given: Body, kind: str, names: Iterable[str], place: str = "") -> None:
    """Raise ``FieldError`` if ``given``, which is of type ``kind``, lacks one of the fields ``names``."""
    values: dict[str, Any] = given.__dict__
    for name in names:
        if values[name] is None:
            raise FieldError(place + name, f'is required with the type "{kind}"')
