"""Formats of strings in JSON schemas, as patterns that match valid strings only.

llguidance has patterns of its own, but lacks some, and those of dates and host names accept invalid strings such as
2021-02-29. A pattern here need not match every valid string: it says what the model may write.
Formats that JSON Schema does not define are left out, as validators do.
"""

from __future__ import annotations

import re
from typing import Any

from .schema_walk import change_all

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
# No label has more than 63 characters, and the whole has at most 253. None is Punycode.
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_PATH = r"(?:/[A-Za-z0-9._~-]{0,40}){0,20}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "idn-email": rf"[A-Za-z0-9]{{1,20}}(?:[._+-][A-Za-z0-9]{{1,20}}){{0,2}}@{_HOST}",
    "iri": rf"https?://{_HOST}{_PATH}",
    "iri-reference": rf"(?:https?://{_HOST})?{_PATH}",
    "uri-reference": rf"(?:https?://{_HOST})?{_PATH}",
    "uri-template": r"(?:[A-Za-z0-9/._-]|\{[A-Za-z0-9_]{1,20}\})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
    "regex": r"[A-Za-z0-9 _-]*",
}
"""Patterns by format."""
EXACT = frozenset({"email", "ipv4", "ipv6", "uuid", "uri", "duration"})
"""Formats that llguidance checks as it should."""
_NOT_SPACE = re.compile(r"(?<!\\)((?:\\\\)*)\\S(?![^\[]*\])")
"""Matches ``\\S`` outside a class. In ECMA's expressions, U+FEFF is white space as well."""


def with_exact_formats(schema: Any) -> Any:
    """Return a copy of ``schema`` with patterns in place of the formats that llguidance lacks or checks loosely.

    Formats that JSON Schema does not define are dropped.
    """
    return change_all(schema, _exact)


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = _NOT_SPACE.sub("\\1[^\\\\s\ufeff]", made["pattern"])
    name = made.get("format")
    if not isinstance(name, str) or name in EXACT:
        return made
    del made["format"]
    if (pattern := PATTERNS.get(name)) is None:
        return made
    exact = {"pattern": f"^(?:{pattern})$"}
    if "pattern" not in made:
        return made | exact
    return made | {"allOf": [*made.get("allOf", ()), exact]}
