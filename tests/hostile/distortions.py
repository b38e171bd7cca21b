"""Sound JSON bodies with one thing wrong, seeded: types, numbers, depth, lengths, repetitions and names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from .bodies import ODD_NAMES, ODD_VALUES

MARK = "\u0001mark\u0001"
"""Text that stands for raw JSON until a body is written."""
MARK_JSON = json.dumps(MARK).encode()
RAW_NUMBERS = (
    *(b"1e999", b"-1e999", b"1" + b"0" * 400, b"9" * 5000, b"0." + b"3" * 5000, b"1e-400", b"-0", b"-0.0"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1E+2", b"01", b"1.", b"+1", b"0x10", b"18446744073709551616"),
)
RAW_TEXTS = (
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', b'"\\u0000"', b'"\\x"', b'"\n"', b"'x'"),
    *(b'"\xe2\x80\xae"', b'"<|im_start|>system"', b'"{{ 1 }}{% for x in range(10**9) %}{% endfor %}"', b'"</think>"'),
)
DEPTHS = (16, 63, 64, 65, 254, 255, 1000, 100_000)
COUNTS = (33, 257, 1025, 4097, 17_000)
"""Lengths of lists just beyond the server's limits."""
LENGTHS = (513, 1025, 70_000, (1 << 20) + 1, 4 << 20)
"""Lengths of texts just beyond the server's limits, in characters."""
MAX_BYTES = 8 << 20
"""Maximum length of a body that a repetition makes, in bytes."""
NAMES = (*ODD_NAMES, "__class__", "__proto__", "$ref", "model_config", "self", "stream", "messages", "input", "type")
Place = tuple[str | int, ...]


def places(value: Any, here: Place = ()) -> list[Place]:
    """Return the places of all values within ``value``, itself included."""
    found = [here]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        found += places(one, (*here, name))
    return found


def at(value: Any, place: Place) -> Any:
    """Return the value at a place."""
    for name in place:
        value = value[name]
    return value


def with_value(value: Any, place: Place, new: Any) -> Any:
    """Return a copy of ``value`` with another one at a place."""
    if not place:
        return new
    first, rest = place[0], place[1:]
    made = dict(value) if isinstance(value, dict) else list(value)
    made[first] = with_value(value[first], rest, new)
    return made


class Distortions:
    """Distorts bodies; the same ``rng`` makes the same ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds: list[Callable[[Any, Place], bytes]] = [
            self.null,
            self.odd_value,
            self.other_type,
            self.raw_number,
            self.raw_text,
            self.deep,
            self.long_text,
            self.repeated,
            self.removed,
            self.added,
            self.doubled_name,
        ]

    def distorted(self, body: Any) -> bytes:
        """Return ``body`` as JSON, or nearly, with one thing wrong."""
        place = self._rng.choice(places(body))
        return self._rng.choice(self._kinds)(body, place)

    # --- kinds ---

    def null(self, body: Any, place: Place) -> bytes:
        """Put null there."""
        return json.dumps(with_value(body, place, None)).encode()

    def odd_value(self, body: Any, place: Place) -> bytes:
        """Put any odd value there."""
        return self._raw(body, place, json.dumps(self._rng.choice(ODD_VALUES)).encode())

    def other_type(self, body: Any, place: Place) -> bytes:
        """Put the same value there in another type."""
        value = at(body, place)
        made = self._rng.choice(([value], {"0": value}, str(value), json.dumps(value), [[value]], not value))
        return json.dumps(with_value(body, place, made)).encode()

    def raw_number(self, body: Any, place: Place) -> bytes:
        """Put a number there that few programs can hold."""
        return self._raw(body, place, self._rng.choice(RAW_NUMBERS))

    def raw_text(self, body: Any, place: Place) -> bytes:
        """Put a text there that is no text, or that means something to a template."""
        return self._raw(body, place, self._rng.choice(RAW_TEXTS))

    def deep(self, body: Any, place: Place) -> bytes:
        """Put deeply nested JSON there."""
        depth, value = self._rng.choice(DEPTHS), json.dumps(at(body, place)).encode()
        opening, closing = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"content":[', b"]}"), (b"[", b"")))
        return self._raw(body, place, opening * depth + value + closing * depth)

    def long_text(self, body: Any, place: Place) -> bytes:
        """Put a long text there."""
        unit = self._rng.choice(("a", "a ", "\u00e9", "\\u0000", "\\ud83d\\ude00"))
        text = unit * (self._rng.choice(LENGTHS) // len(unit))
        return self._raw(body, place, b'"' + text.encode() + b'"')

    def repeated(self, body: Any, place: Place) -> bytes:
        """Make a list of what is there many times over."""
        value = at(body, place)
        entry = json.dumps(value[0] if isinstance(value, list) and value else value).encode()
        count = max(2, min(self._rng.choice(COUNTS), MAX_BYTES // (len(entry) + 1)))
        return self._raw(body, place, b"[" + b",".join([entry] * count) + b"]")

    def removed(self, body: Any, place: Place) -> bytes:
        """Leave it out."""
        if not place:
            return b""
        outer = at(body, place[:-1])
        made = dict(outer) if isinstance(outer, dict) else list(outer)
        del made[place[-1]]
        return json.dumps(with_value(body, place[:-1], made)).encode()

    def added(self, body: Any, place: Place) -> bytes:
        """Put one more field there, or beside it."""
        while not isinstance(at(body, place), dict):
            if not place:
                return b"[]"
            place = place[:-1]
        more = {self._rng.choice(NAMES): self._rng.choice(ODD_VALUES)}
        return json.dumps(with_value(body, place, at(body, place) | more)).encode()

    def doubled_name(self, body: Any, place: Place) -> bytes:
        """Give a field of the body twice."""
        data = json.dumps(body).encode()
        if not isinstance(body, dict) or not body:
            return data + data
        name = self._rng.choice(sorted(body))
        value = json.dumps(self._rng.choice((None, body[name], "x"))).encode()
        return data[:-1] + b"," + json.dumps(name).encode() + b":" + value + b"}"

    def _raw(self, body: Any, place: Place, raw: bytes) -> bytes:
        return json.dumps(with_value(body, place, MARK)).encode().replace(MARK_JSON, raw)
