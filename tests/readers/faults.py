"""Damage to files, drawn from a seed: bytes, JSON, fields of a GGUF header, and pieces of a template."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

EDGES = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    13,
    31,
    32,
    33,
    255,
    1 << 16,
    1 << 20,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
)
ODD_JSON = (
    *("null", "true", "false", "-1", "0", "1", "2.5", "-0.0", "1e-320", "1e308", "1e999", "NaN", "-Infinity"),
    *("65536", "1000000", "4294967296", "-2147483649", "9223372036854775808", str(1 << 128), "1" + "0" * 400),
    *('""', '"1"', '"\\u0000"', '"\\ud800"', '"' + "x" * 3000 + '"', "[]", "{}", "[null]", "[0, 0]", "[1, [2]]"),
    *('{"content": 5}', '{"content": "<s>"}', "[" * 3000 + "]" * 3000, '{"a":' * 1500 + "1" + "}" * 1500, "[" * 50),
)
ODD_TEMPLATES = (
    *("{%", "%}", "{{", "}}", "{#", "#}", "{% raw %}", "{% endfor %}", "{% endif %}", "{% else %}", "{% if %}"),
    *("{{ messages }}", "{{ nothing.of.this }}", "{{ messages[99] }}", "{{ messages.content | tojson(indent=[]) }}"),
    *(
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{% block b %}{% endblock %}",
        "{{ ''.__class__ }}",
    ),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'a' * 10**12 }}", "{{ 9 ** 9 ** 4 }}", "{{ 1 / 0 }}"),
    *("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{% if x %}" * 120 + "{% endif %}" * 120, "{% for a in b %}" * 30),
    *(
        "{{ " + "-" * 4000 + "1 }}",
        "{{ [" * 2000,
        "\0",
        "\N{REPLACEMENT CHARACTER}",
        "{{ raise_exception('no') }}",
        "{{ f(*a, **b) }}",
    ),
    *(
        "{% set x = x %}",
        "{% set ns.a = 1 %}",
        "{% generation %}",
        "{% break %}",
        "{{ strftime_now('%Q') }}",
        "{{ 'x' | nofilter }}",
    ),
    *(
        "{% for None in messages %}{% endfor %}",
        "{% set loop = 1 %}",
        "{{ x is notest }}",
        "{{ messages | map('x') | list }}",
    ),
)


class Pairs(list[Any]):
    """A JSON object as ``[key, value]`` lists, so that a key may be there twice."""


class Raw(str):
    """JSON text as it is to be written."""


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, double, remove or overwrite some bytes."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(broken) + 1)
        length = rng.choice((1, 1, 2, 8, rng.randrange(1, 1 + max(1, len(broken) // 4))))
        match rng.randrange(7):
            case 0 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 1:
                del broken[at:]
            case 2:
                broken[at:at] = broken[at : at + length]
            case 3:
                del broken[at : at + length]
            case 4:
                broken[at : at + length] = rng.choice((b"\0", b"\xff", b" ", b'"', b"{", b"[")) * length
            case 5:
                broken[at:at] = rng.randbytes(min(length, 64))
            case _:
                size = rng.choice((1, 2, 4, 8))
                broken[at : at + size] = (rng.choice(EDGES) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(broken)


def damage_json(rng: random.Random, data: bytes) -> bytes:
    """Change some values or keys of a JSON file; sometimes bytes of its text."""
    if rng.random() < 0.2:
        return damage_bytes(rng, data)
    top = [json.loads(data, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _damage_value(rng, top)
    text = written(top[0]).encode(errors="surrogatepass")
    return damage_bytes(rng, text) if rng.random() < 0.1 else text


def written(value: Any) -> str:
    """Return the JSON text of what ``json.loads`` gave, with objects as ``Pairs``."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(entry)}" for key, entry in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


class _Slot(NamedTuple):
    """A value within a tree, and what holds it: ``holder[index]``."""

    holder: list[Any]
    index: int
    of_object: Pairs | None
    """The object that ``holder`` is an entry of."""


def _slots(value: Any) -> list[_Slot]:
    found: list[_Slot] = []
    if isinstance(value, Pairs):
        for pair in value:
            found += [_Slot(pair, 1, value), *_slots(pair[1])]
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            found += [_Slot(value, i, None), *_slots(entry)]
    return found


def _damage_value(rng: random.Random, top: list[Any]) -> None:
    slots = _slots(top)
    holder, index, of_object = rng.choice(slots)
    value = holder[index]
    match rng.randrange(9):
        case 0 if of_object is not None:
            of_object.remove(holder)
        case 1 if of_object is not None:
            twin = rng.choice((value, Raw(rng.choice(ODD_JSON))))
            of_object.insert(rng.randrange(len(of_object) + 1), [holder[0], twin])
        case 2 if of_object is not None:
            holder[0] = rng.choice(
                ("", holder[0] + "x", holder[0][:-1], "\u0000", rng.choice(of_object)[0], "__metadata__")
            )
        case 3:
            other = rng.choice(slots)
            if not isinstance(value, list) and not isinstance(other.holder[other.index], list):
                holder[index], other.holder[other.index] = other.holder[other.index], value
        case 4 if isinstance(value, int | float):
            holder[index] = rng.choice(
                (value + 1, value - 1, -value, value * 2, value // 2, rng.choice(EDGES), str(value))
            )
        case 5 if isinstance(value, str):
            holder[index] = rng.choice((value[:-1], value + value, value.upper(), f" {value}", value[::-1], [value]))
        case 6 if isinstance(value, list) and value:
            value.append(value[0]) if rng.random() < 0.5 else value.pop(rng.randrange(len(value)))
        case 7:
            holder[index] = [value]
        case _:
            holder[index] = Raw(rng.choice(ODD_JSON))


def damage_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header of a safetensors file, its length, or bytes."""
    if rng.random() < 0.25:
        # Bits of numbers are no damage that anything could see.
        (length,) = struct.unpack_from("<Q", data)
        return damage_bytes(rng, data[: 8 + length]) + data[8 + length :]
    (length,) = struct.unpack_from("<Q", data)
    header = damage_json(rng, data[8 : 8 + length])
    size = len(header) if rng.random() < 0.9 else rng.choice((*EDGES, length, (1 << 64) - 1))
    numbers = data[8 + length :]
    if rng.random() < 0.1:
        numbers = rng.choice((numbers[: rng.randrange(len(numbers))], numbers + b"\0" * rng.randrange(1, 64)))
    return struct.pack("<Q", size) + header + numbers


def damage_gguf(rng: random.Random, data: bytes, fields: Sequence[tuple[int, int]]) -> bytes:
    """Change some of ``fields``, which are (position, size) of numbers in the header, or bytes of the header."""
    end = fields[-1][0] + fields[-1][1]
    if rng.random() < 0.3:
        return damage_bytes(rng, data[:end]) + data[end:]
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, size = rng.choice(fields)
        value = int.from_bytes(broken[at : at + size], "little")
        other = rng.choice(fields)
        changes = (
            value + 1,
            value - 1,
            value * 2,
            value ^ 1 << rng.randrange(8 * size),
            rng.choice(EDGES),
            (1 << 64) - 1,
        )
        copied = int.from_bytes(broken[other[0] : sum(other)], "little")
        broken[at : at + size] = (rng.choice((*changes, copied)) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(broken if rng.random() < 0.95 else broken[: rng.randrange(len(broken))])


def gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """Return the position and size of every number in a good GGUF header: counts, lengths, types, values, offsets."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    fields = [(4, 4), (8, 8), (16, 8)]
    at = 24

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def string() -> None:
        nonlocal at
        length = number(8)
        at += length

    def value(kind: int) -> None:
        if kind == 9:
            element = number(4)
            for _ in range(number(8)):
                value(element)
        elif kind == 8:
            string()
        else:
            number(sizes[kind])

    for _ in range(int.from_bytes(data[16:24], "little")):
        string()
        value(number(4))
    for _ in range(int.from_bytes(data[8:16], "little")):
        string()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return fields


def damage_template(rng: random.Random, data: bytes) -> bytes:
    """Move, drop and insert pieces of a template; sometimes change bytes."""
    if rng.random() < 0.15:
        return damage_bytes(rng, data)
    pieces = re.findall(r"\{[%{#].*?[%}#]\}|[^{]+|\{", data.decode(), re.DOTALL)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(pieces) + 1)
        match rng.randrange(5):
            case 0 if at < len(pieces):
                pieces[at : at + 1] = []
            case 1 if at < len(pieces):
                pieces.insert(at, rng.choice(pieces))
            case 2 if at < len(pieces):
                words = re.findall(r"\w+|\W", pieces[at])
                words[rng.randrange(len(words))] = rng.choice(
                    (*words, "messages", "loop", "(", "'", "|", "not", "0", ".")
                )
                pieces[at] = "".join(words)
            case 3:
                rng.shuffle(pieces)
            case _:
                pieces.insert(at, rng.choice(ODD_TEMPLATES))
    return "".join(pieces).encode()


Damage = Callable[[random.Random, bytes], bytes]
