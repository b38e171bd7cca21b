"""Environment of the processes that developers' programs start."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).absolute().parents[1]
"""Folder that ``tools`` was imported from."""


def environment() -> dict[str, str]:
    """Return the variables of this process, with ``FOLDER`` in PYTHONPATH: a child finds ``tools`` wherever it runs."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, inherited)])}
