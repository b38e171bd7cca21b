"""Checks the names of a body's fields, at every level, before their types are checked.

A name is one of these:

- served: a field of the body's schema;
- known, but not served (``Body.unserved``): refused by name where its value would change the answer, else ignored;
- unknown: ``--unknown-fields`` says what happens. ``warn`` ignores it and says so, ``refuse`` is a 400, ``ignore``
  is silent.

What is ignored is named in the answer's header ``x-pdserve-ignored``, and once in the log. Both hold printable ASCII
only, and are bounded: names are a client's to choose.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from ....messages.decode import shown
from ..errors import bad_request
from .fields import Body, inner_bodies, named_fields
from .unserved import IGNORED, is_neutral

log = logging.getLogger(__name__)

IGNORED_HEADER = b"x-pdserve-ignored"
UnknownFields = Literal["warn", "refuse", "ignore"]
MAX_HEADER = 1024
"""Maximum length of the header's value, in bytes."""
MAX_NAMED = 32
"""Maximum number of fields that one answer names."""
MAX_HINTS = 8
MAX_FIELDS = 1024
"""Maximum number of names in one object."""
MAX_OBJECTS = 1 << 14
"""Maximum number of objects of one list that are checked: the length of the longest list that any API takes."""
MAX_LOGGED = 256
"""Maximum number of names that are logged in all."""
MAX_NAME = 64
"""Maximum number of characters of a field's name that are repeated."""
TOKEN_CHARACTERS = "!#$&'*+-.^_`|~[]"
"""Characters of a field name, beside letters and digits, that are not percent-encoded in the header and the log."""
MORE = "..."
INDEX = re.compile(r"\[[0-9]+\]")

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "seed": ("sampling_seed",),
    "sampling_seed": ("seed",),
    "max_tokens": ("max_new_tokens", "max_output_tokens", "n_predict"),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "n_predict"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens", "max_new_tokens", "n_predict"),
    "max_output_tokens": ("max_tokens", "max_new_tokens"),
    "max_length": ("max_new_tokens",),
    "min_tokens": ("min_new_tokens",),
    "min_new_tokens": ("min_tokens",),
    "messages": ("input",),
    "prompt": ("text",),
    "inputs": ("text",),
    "text": ("prompt",),
    "parameters": ("sampling_params",),
    "logprobs": ("return_logprob", "n_probs"),
}
"""Names of other APIs and the fields that they may mean here, if the spelling alone does not suggest them."""


class Hint(NamedTuple):
    """A suggestion for an unknown field: the full name of the known field, and the suggestion as a sentence."""

    name: str
    words: str


NO_HINT = Hint("", "")


class IgnoredField(NamedTuple):
    """A field that has no effect. ``place``: the path of the object that contains it, ending in a dot, or empty."""

    place: str
    schema: type[Body]
    name: str
    is_unknown: bool

    @property
    def path(self) -> str:
        """The field's full name, with the indices of lists, in printable ASCII."""
        return self.place + _plain(self.name)

    @property
    def kind(self) -> str:
        """The field's path with ``[]`` for list indices, so that the log names a field once for all items of a list."""
        return INDEX.sub("[]", self.place) + _plain(self.name)


class FieldNames:
    """Checks names for one server; remembers which ignored ones have been logged."""

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._logged: set[str] = set()

    def check(self, schema: type[Body], content: Mapping[str, Any]) -> bytes:
        """Check the field names of a body by its ``schema``. Return the value of the header that names ignored fields.

        It is empty if there are none, or if the options say to ignore them silently. Log each ignored field, once for
        all requests. Raises ``ApiError`` 400 that names the first refused field.
        """
        search = _Search(refuse=self._unknown == "refuse")
        search.object(schema, content, "")
        if not search.found or self._unknown == "ignore":
            return b""
        for field in search.found:
            self._log(field)
        return _header(search.found, search.is_cut).encode("ascii")

    def _log(self, field: IgnoredField) -> None:
        kind = field.kind
        if kind in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(kind)
        if len(self._logged) > MAX_LOGGED:
            log.warning("clients send more fields that are ignored here; no others are told")
        elif field.is_unknown:
            words = find_hint(field.schema, field.name).words
            log.warning("clients send %s, which is unknown here and ignored%s", kind, words)
        else:
            log.info("clients send %s, which is accepted and ignored here", kind)


class _Search:
    """Checks every name of a body, as any may be refused; keeps the first few that are ignored."""

    def __init__(self, *, refuse: bool) -> None:
        self.found: list[IgnoredField] = []
        self.is_cut = False
        self._refuse = refuse

    def object(self, schema: type[Body], content: Mapping[str, Any], place: str) -> None:
        """Check the names of a JSON object and of those inside it, and append the ignored ones to ``found``.

        ``place``: path of the object, ending in a dot; empty for the body itself. Raises ``ApiError`` 400 if one is
        refused.
        """
        if len(content) > MAX_FIELDS:
            raise bad_request(place.rstrip(".") or None, f"has {len(content)} fields, the limit is {MAX_FIELDS}")
        fields = inner_bodies(schema)
        for name, value in content.items():
            if name not in fields:
                self._other(schema, name, value, place)
            elif (inner := fields[name]) is not None:
                self._value(inner, value, place + name)

    def _value(self, schema: type[Body], value: Any, path: str) -> None:
        if isinstance(value, dict):
            self.object(schema, value, f"{path}.")
        elif isinstance(value, list):
            # A longer list is refused for its length.
            for i, item in enumerate(islice(value, MAX_OBJECTS)):
                if isinstance(item, dict) and schema.is_ignored(item):
                    self._ignore(IgnoredField(f"{path}[{i}].", schema, "type", is_unknown=False))
                elif isinstance(item, dict):
                    self.object(schema, item, f"{path}[{i}].")

    def _other(self, schema: type[Body], name: str, value: Any, place: str) -> None:
        neutral = schema.unserved.get(name)
        if neutral is not None:
            if not is_neutral(value, neutral):
                raise bad_request(place + name, "this server does not serve this field; leave it out")
            is_reported = neutral is IGNORED
        elif self._refuse or schema.refuses_unknown:
            hint = find_hint(schema, name).words
            raise bad_request(place + shown(name, MAX_NAME), f"there is no such field{hint}")
        else:
            is_reported = True
        if is_reported and value is not None:
            self._ignore(IgnoredField(place, schema, name, is_unknown=neutral is None))

    def _ignore(self, field: IgnoredField) -> None:
        if len(self.found) < MAX_NAMED:
            self.found.append(field)
        else:
            self.is_cut = True


def _header(fields: list[IgnoredField], is_cut: bool) -> str:
    """Return the header's value: the fields' paths as ``name, name;did-you-mean=other``.

    It ends with ``...`` if fields are left out: those beyond ``MAX_HEADER`` bytes, or others if ``is_cut``.
    ``is_cut``: more fields were ignored than ``fields`` holds.
    """
    value = ""
    for i, field in enumerate(fields):
        # A hint costs a comparison with every known name.
        hint = find_hint(field.schema, field.name).name if field.is_unknown and i < MAX_HINTS else ""
        item = f"{field.path};did-you-mean={hint}" if hint else field.path
        if len(value) + len(item) + len(MORE) + 4 > MAX_HEADER:
            is_cut = True
            break
        value += f", {item}" if value else item
    return f"{value}, {MORE}" if is_cut else value


def _plain(name: str) -> str:
    """Return a client's ``name`` percent-encoded to printable ASCII, cut off after ``MAX_NAME`` characters."""
    encoded = quote(name[: MAX_NAME + 1], safe=TOKEN_CHARACTERS)
    return encoded if len(encoded) <= MAX_NAME else encoded[:MAX_NAME] + MORE


def find_hint(schema: type[Body], name: str) -> Hint:
    """Return a suggestion for an unknown field ``name``: a similar field of ``schema``, or the object that it fits in.

    Return ``NO_HINT`` if there is none, or for a name longer than ``MAX_NAME`` characters.
    """
    # Don't cache long names: a client could fill the cache with names of 32 MiB.
    return NO_HINT if len(name) > MAX_NAME else _find_hint(schema, name)


@lru_cache(maxsize=1024)
def _find_hint(schema: type[Body], name: str) -> Hint:
    if name in schema.belongs:
        place = schema.belongs[name]
        return Hint(f"{place}.{name}", f'; it belongs in "{place}"')
    known = named_fields(schema).keys()
    meant = [other for other in ELSEWHERE.get(name, ()) if other in known]
    near = meant or difflib.get_close_matches(name.lower(), known, 1)
    return Hint(near[0], f'; did you mean "{near[0]}"?') if near else NO_HINT
