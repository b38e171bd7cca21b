"""Fields that clients of SGLang, vLLM and OpenAI send and this server does not serve.

There are three kinds:
- *Refused unless neutral*: a field that would change the answer. It is accepted with the values declared here, which
  ask for nothing, so that a client that spells out its defaults works. Any other value is refused by name. Only the
  declared values are neutral, not every falsy one.
- *Tolerated*: a field that never changes an answer is accepted with any value (``ANYTHING``).
- *Ignored*: a field that other servers act on without changing the answer. It is accepted, and named in the answer's
  header and once in the log (``field_names.py``).

Each body declares its own in ``Body.unserved``. ``null`` means "not given" everywhere. docs/http-api.md has a table of
them, which ``docs/generate_fields.py`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ANYTHING: Final = (object(),)
"""Neutral values of a field that never changes an answer, such as a label for its sender."""
IGNORED: Final = (object(),)
"""Neutral values of a field without effect here although clients may expect one: the response names it as ignored."""

Unserved = Mapping[str, tuple[Any, ...]]


def neutral(*values: Any, names: str) -> dict[str, tuple[Any, ...]]:
    """Return entries for fields that are accepted only with one of ``values``, or null.

    ``names``: names of the fields, separated by spaces.
    """
    return dict.fromkeys(names.split(), values)


STRUCTURE: Unserved = {
    **neutral("", [], names="stop_regex"),
    **neutral(False, names="no_stop_trim"),
    **neutral({}, names="custom_params"),
    **neutral(0, names="thinking_budget"),
}
"""Fields about structured output, which several APIs have."""


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether ``value`` is null or one of the ``neutral`` values, so that the field asks for nothing.

    ``False`` is not 0 here, and ``True`` is not 1.
    """
    if value is None or neutral is ANYTHING or neutral is IGNORED:
        return True
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)
