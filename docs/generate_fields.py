"""Writes the tables of request fields in ``docs/http-api.md`` from the schemas. ``make docs`` runs it.

A test compares the page with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.server.http.bodies.fields import Body
from pdserve.server.http.bodies.unserved import ANYTHING, IGNORED
from pdserve.server.http.native.schemas import GenerateBody, SamplingParamsBody
from pdserve.server.http.openai.schemas import ChatBody, ChatMessageBody, CompletionBody, StreamOptions, TextPart

PAGE = Path(__file__).with_name("http-api.md")
BEGIN = "<!-- Written by `make docs` from server/http/*/schemas.py: edit those. -->"
END = "<!-- End of what `make docs` writes. -->"
BETWEEN = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
ABSENT = "–"


class Api(NamedTuple):
    """A column of the table: schemas of request bodies, each with the prefix of its fields' paths."""

    title: str
    bodies: tuple[tuple[type[Body], str], ...]


APIS = (
    Api("`/v1/chat/completions`", ((ChatBody, ""),)),
    Api("`/v1/completions`", ((CompletionBody, ""),)),
    Api("`/generate`", ((GenerateBody, ""), (SamplingParamsBody, "in `sampling_params`: "))),
)
INSIDE = (
    Api("`messages[]`", ((ChatMessageBody, ""),)),
    Api("`messages[].content[]`", ((TextPart, ""),)),
    Api("`stream_options`", ((StreamOptions, ""),)),
)


def render() -> str:
    """Return the page with its tables as the code has them."""
    text = PAGE.read_text(encoding="utf-8")
    tables = f"{BEGIN}\n\n{table(APIS)}\n\nThe objects inside of them:\n\n{table(INSIDE)}\n\n{END}"
    return BETWEEN.sub(lambda _: tables, text)


def table(apis: tuple[Api, ...]) -> str:
    """Return a table with a row for each field of any of ``apis``, by name."""
    names = sorted({name for api in apis for body, _ in api.bodies for name in names_of(body)})
    rows = [("field", *(api.title for api in apis))]
    rows += [("---",) * len(rows[0])]
    rows += [(f"`{name}`", *(cell(api, name) for api in apis)) for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def names_of(body: type[Body]) -> Iterator[str]:
    """Return the column's fields, served or not, without the ones that only routers send."""
    yield from (name for name in (*body.model_fields, *body.unserved) if not name.startswith("bootstrap_"))


def cell(api: Api, name: str) -> str:
    """Return the table cell that says how field ``name`` is treated."""
    found = [place + fate(body, name) for body, place in api.bodies if name in set(names_of(body))]
    return "; ".join(found) or ABSENT


def fate(body: type[Body], name: str) -> str:
    """Served with its default, ignored, or refused but for some values."""
    if name in body.model_fields:
        field = body.model_fields[name]
        if field.is_required():
            return "served, required"
        default = field.get_default(call_default_factory=True)
        return "served" if default is None else f"served, default {shown(default)}"
    neutral = body.unserved[name]
    if neutral is ANYTHING:
        return "changes nothing"
    if neutral is IGNORED:
        return "ignored"
    return f"only {alternatives(neutral)}"


def alternatives(values: Iterable[Any]) -> str:
    """Join the values that ask for nothing, beside null, which always does."""
    return " or ".join(map(shown, values)) or "null"


def shown(value: Any) -> str:
    """Return a value as JSON in code marks."""
    return f"`{json.dumps({} if isinstance(value, Body) else value)}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
