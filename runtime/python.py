"""The command line of every Python process that pdserve starts."""

from __future__ import annotations

import sys
from pathlib import Path

FLAGS = ("-P", "-X", "utf8")
"""Import nothing from the current directory or from a script's folder; text is UTF-8 whatever the locale is."""


def python_command(*words: str, python: str | Path | None = None) -> list[str]:
    """Return the command line that runs Python with ``FLAGS`` and then ``words``, like ``"-m", MODULE``.

    ``python``: path of another interpreter than this process's.
    """
    return [str(python or sys.executable), *FLAGS, *words]
