"""The command line of every Python process that pdserve starts."""

from __future__ import annotations

import sys
from pathlib import Path

FLAGS = ("-P", "-X", "utf8")
"""Import nothing from the current directory or from a script's folder; text is UTF-8 whatever the locale is."""


def python_command(*words: str, python: str | Path | None = None) -> list[str]:
    """Return the command for ``words``, like ``"-m", MODULE``; ``python``: another interpreter than this one."""
    return [str(python or sys.executable), *FLAGS, *words]
