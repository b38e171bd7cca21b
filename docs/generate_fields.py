"""Writes the tables of request fields in ``docs/http-api.md`` from the schemas. ``make docs`` runs it.

A test compares the page with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import AtRouter
from pdserve.server.http.app import load_endpoint
from pdserve.server.http.bodies.fields import Body, inner_bodies, named_fields
from pdserve.server.http.bodies.unserved import ANYTHING, IGNORED

PAGE = Path(__file__).with_name("http-api.md")
BEGIN = "<!-- Written by `make docs` from server/http/*/schemas.py: edit those. -->"
END = "<!-- End of what `make docs` writes. -->"
BETWEEN = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
ABSENT = "–"


PATHS_OF = {load_endpoint(facts).body: facts.path for facts in reversed(PATHS) if facts.at_router is AtRouter.GENERATE}
"""Path of each body that generates; of several, the first one. The first column is of the API declared last."""
Column = Mapping[str, str]
"""How an API treats each of its fields, by the field's path."""


def render() -> str:
    """Return the page with its tables as the code has them."""
    text = PAGE.read_text(encoding="utf-8")
    columns = {f"`{path}`": dict(column(body)) for body, path in PATHS_OF.items() if body is not None}
    top = {title: {name: one for name, one in rows.items() if "." not in name} for title, rows in columns.items()}
    inside = {title: {name: one for name, one in rows.items() if "." in name} for title, rows in columns.items()}
    tables = f"{BEGIN}\n\n{table(top)}\n\nThe objects inside of them:\n\n{table(inside)}\n\n{END}"
    return BETWEEN.sub(lambda _: tables, text)


def table(columns: Mapping[str, Column]) -> str:
    """Return a table with a row for each field of any column, by name. Columns without fields are left out."""
    columns = {title: rows for title, rows in columns.items() if rows}
    names = sorted({name for rows in columns.values() for name in rows})
    rows = [("field", *columns), ("---",) * (len(columns) + 1)]
    rows += [(f"`{name}`", *(column.get(name, ABSENT) for column in columns.values())) for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def column(body: type[Body], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a body and of the objects in it, served or not, with how each is treated.

    Fields that other APIs have at the top stand there, too. Those that only routers send are left out.
    """
    apart = set(body.belongs.values())
    inner = {name: nested for name, nested in inner_bodies(body).items() if nested is not None}
    for name in (*named_fields(body), *body.unserved):
        if not name.startswith("bootstrap_"):
            yield path + name, fate(body, name)
        if name in apart and name in inner:
            yield from ((field, f"in `{name}`: {said}") for field, said in column(inner[name]))
        elif name in inner:
            items = "[]" if is_list(named_fields(body)[name].annotation) else ""
            yield from column(inner[name], f"{path}{name}{items}.")


def is_list(annotation: Any) -> bool:
    """Return whether values of a type may be lists of objects."""
    if get_origin(annotation) is list:
        return True
    return any(is_list(argument) for argument in get_args(annotation))


def fate(body: type[Body], name: str) -> str:
    """Served with its default, ignored, or refused but for some values."""
    if name not in body.unserved:
        field = named_fields(body)[name]
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
