"""Reads the words that docs/glossary.md replaces."""

from __future__ import annotations

import re
from pathlib import Path

CODE = re.compile(r"`([^`]+)`")


def read_glossary(page: Path) -> dict[str, str]:
    """Return the term to write for each banned word of the glossary's table.

    A row is ``| term | meaning | instead of |``. Words of the third column that are marked as code are banned.
    """
    terms: dict[str, str] = {}
    if not page.exists():
        return terms
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("|") and len(cells) == 3:
            terms |= {word.lower(): cells[0] for word in CODE.findall(cells[2])}
    return terms
