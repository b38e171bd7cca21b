"""Shows the sections of options as headings of ``--help`` and docs/flags.md.

Sections name their heading without the command line's library, which the processes of an instance never load.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from ..runtime.options import HIDDEN, heading_of


def show_headings(*commands: type) -> None:
    """Change the annotations of each class in ``commands``, so that ``--help`` shows options under their headings.

    ``commands``: dataclasses of options. Hidden options get no flag.
    """
    groups: dict[Any, Group] = {}
    for options in commands:
        hints = get_type_hints(options, include_extras=True)
        for field in fields(options):
            heading = heading_of(options, field.name)
            hidden = field.metadata.get("help") == HIDDEN
            if heading not in groups:
                groups[heading] = Group(heading.title, sort_key=heading.order)
            parameter = Parameter(parse=False) if hidden else Parameter(group=groups[heading])
            options.__annotations__[field.name] = Annotated[hints[field.name], parameter]
            # Otherwise cyclopts evaluates this text in the module of ``options``, which lacks names of other sections.
            options.__init__.__annotations__[field.name] = hints[field.name]  # type: ignore[misc]
