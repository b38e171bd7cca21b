"""Declaration of options: a section is a dataclass, and each of its fields declares one option.

A section lies beside the code that reads it. If an option names an entry of a registry, the registry gives its choices.
A process of a server declares the sections that it reads as a class that inherits them. ``server/options.py`` composes
all sections. The command line, YAML files, ``--help``, docs/flags.md and the checks derive from the fields.

To add an option, add a field to its section::

    page_size: int = opt(default=16, help="Tokens in a KV page.", at_least=1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields
from typing import Any, NamedTuple, TypeVar

Section = TypeVar("Section")
HIDDEN = "hidden"
"""Help text of an option that no flag sets: the command decides its value."""


class OptionError(ValueError):
    """Options that can't work; the message says what to write instead, with each complaint on a line of its own."""


def opt(
    *,
    default: Any = MISSING,
    default_factory: Callable[[], Any] | Any = MISSING,
    help: str,
    at_least: float | None = None,
    above: float | None = None,
    not_empty: bool = False,
) -> Any:
    """Declare an option, as the default value of a section's field.

    Parameters
    ----------
    help
        Text of ``--help`` and docs/flags.md.
    at_least, above
        Bounds of a number. A number that is None has no bounds. One with bounds has to be finite.
    not_empty
        Whether a text has to have more than blanks.
    """
    metadata = {"help": help, "at_least": at_least, "above": above, "not_empty": not_empty}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


class Heading(NamedTuple):
    """A heading of ``--help`` and docs/flags.md."""

    title: str
    order: int


def section(title: str, order: int) -> Callable[[type[Section]], type[Section]]:
    """Make a class decorator that puts a dataclass's options under the heading ``title``. ``order`` sorts headings."""

    def mark(cls: type[Section]) -> type[Section]:
        cls.heading = Heading(title, order)  # type: ignore[attr-defined]
        return cls

    return mark


def heading_of(options: type, name: str) -> Heading:
    """Return the heading of option ``name``: that of the section that declares it first."""
    declared = [cls for cls in options.__mro__ if name in vars(cls).get("__annotations__", {})]
    heading: Heading = vars(declared[-1])["heading"]
    return heading


def flag(name: str) -> str:
    """Return the command-line flag of the option ``name``: "--page-size" for "page_size"."""
    return "--" + name.replace("_", "-")


def check_options(options: Any) -> None:
    """Raise ``OptionError`` if ``options`` can't work together.

    Each class that ``options`` inherits may have a generator method ``problems``. It yields a complaint for each wrong
    option or combination of the sections that it can see.
    """
    complaints = list(_out_of_bounds(options))
    for cls in reversed(type(options).__mro__):
        if "problems" in vars(cls):
            complaints += vars(cls)["problems"](options)
    if complaints:
        raise OptionError("\n".join(complaints))


def _out_of_bounds(options: Any) -> Iterator[str]:
    for declared in fields(options):
        value = getattr(options, declared.name)
        if value is not None and (problem := _problem(declared, value)):
            yield f"{flag(declared.name)} {problem}"


def _problem(declared: Field[Any], value: Any) -> str:
    least, above = declared.metadata.get("at_least"), declared.metadata.get("above")
    if least is not None and not (value >= least and math.isfinite(value)):
        return f"is {value}: it must be {least:g} or more"
    if above is not None and not (value > above and math.isfinite(value)):
        return f"is {value}: it must be above {above:g}"
    if declared.metadata.get("not_empty") and not value.strip():
        return "is empty: give a value or leave the flag out"
    return ""
