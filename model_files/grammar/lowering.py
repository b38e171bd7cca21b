"""Translates grammars to the form that llguidance reads.

That form is JSON: a list of grammars, of which the first is the output's and refers to others by ``@name``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from ...messages.grammar import Grammar
from .complements import required_names
from .errors import GrammarError
from .formats import with_exact_formats
from .rewrites import Rewriter
from .schema_walk import change_all

SpecialId = Callable[[str], int | None]
WHITE_SPACE = r"[ \n\t]{0,40}"
"""White space between the tokens of JSON. Unlimited, a model at a high temperature may write nothing else."""
ESCAPES = 'nrbtf\\"'
"""Escapes in strings of JSON. With ``\\u``, a property could be written twice: once by an escape of its name."""
OBJECT = {"type": "object"}
GUIDE = {"x-guidance": {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}}
NUMBERED_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
MAX_TAGS = 1024
MAX_DEPTH = 256


def lower(grammar: Grammar, special_id: SpecialId = lambda text: None) -> str:
    """Return ``grammar`` as llguidance reads it. Raises ``GrammarError``.

    ``special_id``: returns the id of a special token by its text. Such a token is matched as one.
    """
    _check_depth(grammar.source)
    try:
        if grammar.kind == "tool_calls":
            body = _tool_calls(grammar.source, special_id)
        else:
            body = LOWER[grammar.kind](grammar.source)
    except GrammarError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgspec.ValidationError) as e:
        raise GrammarError(f"{grammar.kind}: {e}") from e
    begin, end = (marker.strip() for marker in grammar.reasoning)
    if not end:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"lark_grammar": _with_reasoning(grammar, begin, end, special_id)}, body]})


def _check_depth(source: str) -> None:
    """Raise ``GrammarError`` if brackets are nested deeper than ``MAX_DEPTH``, because compilers recurse into them."""
    depth = deepest = 0
    for character in source:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            # A string may hold more of these.
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise GrammarError(f"brackets are nested {deepest} deep; the limit is {MAX_DEPTH}")


def _with_reasoning(grammar: Grammar, begin: str, end: str, special_id: SpecialId) -> str:
    """Return a Lark grammar: optional reasoning, and then the grammar named "body".

    ``begin`` and ``end``: texts around the reasoning. It has begun already if ``begin`` is empty or the grammar says
    so. ``special_id``: returns the id of a special token by its text, or None.
    """

    def mark(text: str) -> str:
        token = special_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    if special_id(end) is None:
        rules = ["thought: open_thought /\\s*/", f"open_thought[suffix={json.dumps(end)}]: /(?s:.*)/"]
    else:
        rules = [f"thought: open_thought {mark(end)} /\\s*/", "open_thought: /(?s:.*)/"]
    if grammar.is_reasoning_open or not begin:
        start = "start: thought @body"
    else:
        start = f"start: (/\\s*/ {mark(begin)} thought)? @body"
    return "\n".join([start, *rules])


def _json_schema(source: str) -> dict[str, Any]:
    schema = json.loads(source)
    if not isinstance(schema, dict | bool):
        raise GrammarError("json_schema: the schema must be a JSON object")
    return {"name": "body", "json_schema": _usable({"allOf": [False]} if schema is False else schema or {})}


def _refuse_unclear(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise ``GrammarError`` for what llguidance would take for something else.

    - Constants and names with characters that only an escape by number can write. Without such escapes (see
      ``ESCAPES``), it leaves these characters out.
    - A reference to another document beside an `$id`. Until draft 7, the `$id` does not count there.
    """
    texts = json.dumps([schema.get(key) for key in ("const", "enum", "properties", "required")])
    if NUMBERED_CONTROL.search(texts):
        raise GrammarError("json_schema: control characters in constants and names of properties are not supported")
    if schema.keys() & {"$id", "id"} and isinstance(to := schema.get("$ref"), str) and not to.startswith("#"):
        raise GrammarError(f"json_schema: $ref {to[:64]!r} beside $id depends on the draft; leave out this $id")
    return schema


def _usable(schema: Any) -> dict[str, Any]:
    """Return ``schema`` in a form that llguidance can use, rewritten only if it cannot be used as it is.

    If no form can be used, the one without rewriting is returned, and the compiler's error tells the reason. Raises
    ``GrammarError`` for what llguidance would misunderstand.
    """
    change_all(schema, _refuse_unclear)
    whole = {} if schema is True else schema
    plain = _readable(whole)
    for made in (plain, *(_readable(Rewriter(whole, narrowest).rewritten()) for narrowest in (False, True))):
        if not _reason(made):
            return made
    # The reason is about the schema that the client knows.
    change_all(plain, _refuse_counts)
    return plain


def _readable(schema: Any) -> dict[str, Any]:
    exact = with_exact_formats(schema)
    return (exact if isinstance(exact, dict) else {"allOf": [exact]}) | GUIDE


def _refuse_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise ``GrammarError`` for a minimum of properties that one name, written twice, may reach.

    llguidance counts such a name twice if neither `properties` nor `required` has it.
    """
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(required_names(schema)) + 1:
        raise GrammarError("json_schema: minProperties is supported for names in properties, and for one other name")
    return schema


def _reason(schema: dict[str, Any]) -> str:
    """Return why llguidance cannot use ``schema``; empty if it can."""
    # Imported here: llguidance takes a tenth of a second.
    from llguidance import LLMatcher

    try:
        change_all(schema, _refuse_counts)
    except GrammarError as e:
        return str(e)
    return LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


def _regex(source: str) -> dict[str, Any]:
    return {"name": "body", "lark_grammar": f"start: /{_escape_slashes(source)}/"}


def _escape_slashes(regex: str) -> str:
    """Return ``regex`` with slashes and line breaks escaped, to stand between slashes as a literal."""
    out, escaped = [], False
    for character in regex:
        if character == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(out)


def _lark(source: str) -> dict[str, Any]:
    return {"name": "body", "lark_grammar": source}


def _ebnf(source: str) -> dict[str, Any]:
    # Imported here: llguidance takes a tenth of a second.
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return _lark(any_to_lark(source))
    except Exception as e:  # it raises plain ones for rules that are missing
        raise GrammarError(f"ebnf: {e}") from e


def _choice(source: str) -> dict[str, Any]:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise GrammarError("choice: give a list of texts, none of them empty")
    return _lark("start: " + " | ".join(json.dumps(one) for one in choices))


class _Tag(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | str = msgspec.field(default_factory=dict)
    """A JSON schema, or its text."""


class _Tags(msgspec.Struct):
    structures: list[_Tag]
    triggers: list[str]


def _structural_tag(source: str) -> dict[str, Any]:
    from llguidance import StructTag

    given = msgspec.json.decode(source, type=_Tags)
    if not 0 < len(given.structures) <= MAX_TAGS:
        raise GrammarError(f"structural_tag: {len(given.structures)} structures; give 1 to {MAX_TAGS}")
    tags = []
    for one in given.structures:
        trigger = next((text for text in given.triggers if text and one.begin.startswith(text)), None)
        if trigger is None:
            raise GrammarError(f"structural_tag: no trigger begins {one.begin!r}")
        schema = json.loads(one.schema) if isinstance(one.schema, str) else one.schema
        if not isinstance(schema, dict):
            raise GrammarError(f"structural_tag: the schema of {one.begin!r} must be a JSON object")
        tags.append(StructTag(trigger=trigger, begin=one.begin, grammar=_usable(schema), end=one.end))
    return _lark(StructTag.to_grammar(tags, assume_special=False))


def _tool_calls(source: str, special_id: SpecialId) -> dict[str, Any]:
    """Return the grammar of one call of a tool or, if ``source`` (JSON) has ``many`` set, of several.

    ``marks`` in ``source`` are texts that may be special tokens. ``special_id``: returns the id of a special token by
    its text, or None.
    """
    given = json.loads(source)
    calls, ids = given["calls"], {mark: special_id(mark) for mark in given["marks"]}
    marks = sorted((mark for mark, token in ids.items() if token is not None), key=len, reverse=True)

    def literal(text: str) -> str:
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks), text) if marks else [text]
        return " ".join(f"<[{ids[part]}]>" if part in marks else json.dumps(part) for part in parts if part)

    rules = [f"call_{i}: {literal(one['before'])} args_{i} {literal(one['after'])}" for i, one in enumerate(calls)]
    rules += [f"args_{i}: %json {json.dumps(_usable(_of_object(one['schema'])))}" for i, one in enumerate(calls)]
    one_call = " | ".join(f"call_{i}" for i in range(len(calls)))
    more = f" ({literal(given['separator'])} one_call)*" if given["many"] else ""
    start = f"start: {literal(given['prefix'])} one_call{more} {literal(given['suffix'])}"
    return _lark("\n".join([start, f"one_call: {one_call}", *rules]))


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments with objects as its only type.

    Raises ``GrammarError`` if ``schema`` has a type and allows no objects.
    """
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise GrammarError(f"the parameters of a tool must be of type object, not {json.dumps(kind)[:64]}")
    return schema | OBJECT


LOWER: dict[str, Callable[[str], dict[str, Any]]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "lark": _lark,
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
