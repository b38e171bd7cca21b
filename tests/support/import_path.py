"""PYTHONPATH of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def with_inherited(*folders: str | Path) -> str:
    """Return a PYTHONPATH of ``folders`` and what this process inherited.

    It has no empty entry, which Python would take for the current directory.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(str(folder) for folder in (*folders, *inherited) if str(folder))
