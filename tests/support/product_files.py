"""The Python files of the product and of developers' programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("tests", "docs", "examples", "build")


def product_files() -> Iterator[Path]:
    """Return the ``.py`` files in the root and its folders, except for ``OTHERS`` and hidden folders: environments."""
    yield from ROOT.glob("*.py")
    for folder in sorted(ROOT.iterdir()):
        if folder.is_dir() and folder.name not in OTHERS and not folder.name.startswith("."):
            yield from sorted(folder.rglob("*.py"))
