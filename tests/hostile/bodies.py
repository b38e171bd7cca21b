"""Request bodies made from the OpenAPI page, seeded: valid ones, and ones with a few things wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

DEPTH = 5
ODD_NAMES = ("../../etc/passwd", "%00", "a" * 300, "\u202e", "x/y", ".", "", "\x00", "\U0001f600", "alice", "-1")
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 10**100, 0.5, -0.5, 1e308, 1e-320),
    *(
        "",
        "x",
        "\x00",
        "\ud800",
        "x" * 5000,
        "../../x",
        "\u202e\n",
        [],
        [[]],
        [None],
        {},
        {"": {}},
        {"$ref": "#"},
        [1] * 3000,
    ),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 64, 4096, 2**31 - 1, 0.5, 1.0, 1.5)
WORDS = ("a", "Hello there", "stop", "user", "assistant", "mallory", "text", "json", "none", "auto", "\u4f60\u597d")


class Operation(NamedTuple):
    """A method of a path, and the schema of its body (None: it has none)."""

    method: str
    path: str
    schema: dict[str, Any] | None


def operations(page: dict[str, Any]) -> list[Operation]:
    """Return what the OpenAPI page lists."""
    return list(_operations(page))


def _operations(page: dict[str, Any]) -> Iterator[Operation]:
    for path, methods in page["paths"].items():
        for method, described in methods.items():
            content = described.get("requestBody", {}).get("content", {})
            yield Operation(method.upper(), path, content.get("application/json", {}).get("schema"))


class Bodies:
    """Makes bodies and paths; the same ``rng`` makes the same ones."""

    def __init__(self, page: dict[str, Any], rng: random.Random) -> None:
        self._page = page
        self._rng = rng
        self.operations = operations(page)

    def target(self, operation: Operation) -> str:
        """Return a path with its parameters filled in, and at times a query."""
        rng, path = self._rng, operation.path
        while "{" in path:
            before, _, rest = path.partition("{")
            word = rng.choice((*ODD_NAMES, *WORDS, "0", "smollm2"))
            path = before + quote(word, safe="" if rng.random() < 0.5 else "/.") + rest.partition("}")[2]
        if rng.random() < 0.15:
            name = rng.choice(("action", "owner", "x", "stream", "for_now"))
            path += f"?{name}={quote(rng.choice((*ODD_NAMES, 'save', 'restore', 'erase')))}"
        return path

    def body(self, schema: dict[str, Any]) -> bytes:
        """Return a body as JSON, half of the time with mistakes in it."""
        value = self.value(schema)
        for _ in range(self._rng.choice((0, 0, 0, 1, 1, 3))):
            value = self._spoiled(value)
        try:
            data = json.dumps(value, ensure_ascii=self._rng.random() < 0.5).encode("utf-8", "surrogatepass")
        except RecursionError:
            data = b"{}"
        if self._rng.random() < 0.05 and data:
            at = self._rng.randrange(len(data))
            data = data[:at] + self._rng.randbytes(self._rng.randrange(4)) + data[at + 1 :]
        return data

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Return a value that mostly fits the schema."""
        rng, schema = self._rng, self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self.value(rng.choice(schema[key]), depth)
        kind = schema.get("type", "any")
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            count = rng.choice((0, 1, 1, 2, 3, 8)) if depth < DEPTH else 0
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind == "string":
            return rng.choice((*WORDS, *WORDS, *ODD_NAMES))
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "boolean":
            return rng.random() < 0.5
        return None if kind == "null" else rng.choice(ODD_VALUES)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, fields = self._rng, schema.get("properties", {})
        required = [name for name in schema.get("required", ()) if name in fields]
        # Fields that name a hand-over would make every other body a 403.
        free = [name for name in fields if not name.startswith("bootstrap_") or rng.random() < 0.05]
        names = {*required, *rng.sample(free, min(len(free), rng.choice((0, 1, 2, 3, 5))))}
        made = {name: self.value(fields[name], depth + 1) for name in sorted(names)} if depth < DEPTH else {}
        for name in ("text", "input_ids", "prompt"):  # one of these makes a request of it
            if name in fields and not made.keys() & {"text", "input_ids", "prompt"} and rng.random() < 0.7:
                made[name] = [rng.randrange(40000) for _ in range(8)] if name == "input_ids" else rng.choice(WORDS[:3])
        for name in ("max_new_tokens", "max_tokens"):
            if name in made and rng.random() < 0.9:
                made[name] = rng.choice((1, 2, 8, 40))
        return made

    def _number(self, schema: dict[str, Any], kind: str) -> float:
        rng = self._rng
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
        if rng.random() < 0.5 and low is not None and high is not None:
            return rng.choice((low, high, low + 1, high - 1, low - 1, high + 1))
        number = rng.choice(NUMBERS)
        return int(number) if kind == "integer" else number

    def _spoiled(self, value: Any) -> Any:
        """Return ``value`` with one thing replaced, removed or added, somewhere within."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.8:
            name, made = rng.choice(sorted(value)), dict(value)
            kind = rng.randrange(4)
            if kind == 0:
                del made[name]
            elif kind == 1:
                made[rng.choice(ODD_NAMES)] = rng.choice(ODD_VALUES)
            else:
                made[name] = self._spoiled(value[name])
            return made
        if isinstance(value, list) and value and rng.random() < 0.6:
            at = rng.randrange(len(value))
            return [*value[:at], self._spoiled(value[at]), *value[at + 1 :]]
        return rng.choice(ODD_VALUES)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            found: Any = self._page
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema
