"""Reads the repository's prose, and holds each file to what the baseline allows it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .glossary import read_glossary
from .page_texts import page_texts
from .python_texts import python_texts
from .rules import RULES, WHO, Finding, Glossary, check_text
from .text import blocks

READERS = {".py": python_texts, ".md": page_texts}
NOT_OURS = {"build", "dist", "__pycache__", "prebuilt"}
GENERATED = {"docs/flags.md"}
"""Pages that repeat texts which are checked at their declaration."""
WORDS_PER_PERSON = 1000
"""A file may have one word for people in this many words of prose, whatever the baseline says."""

Counts = Mapping[str, int]
"""Number of findings by rule."""


class Report(NamedTuple):
    """Findings in one file, and the number of words of its prose."""

    path: str
    words: int
    findings: list[Finding]

    @property
    def counts(self) -> Counter[str]:
        """Number of findings in the file, by the rule's name."""
        return Counter(finding.rule.name for finding in self.findings)

    def excess(self, allowed: Counts) -> dict[str, int]:
        """Return by how many findings the file exceeds its limits, by the rule's name.

        Rules that are kept are left out. ``allowed``: the limits by rule. The rule on words for people also allows one
        in ``WORDS_PER_PERSON`` words.
        """
        counts, limits = self.counts, dict(allowed)
        limits[WHO.name] = max(limits.get(WHO.name, 0), self.words // WORDS_PER_PERSON)
        over = {rule.name: counts[rule.name] - limits.get(rule.name, 0) for rule in RULES}
        return {name: count for name, count in over.items() if count > 0}


def read_repository(root: Path) -> list[Report]:
    """Check every file of prose below ``root``, in the order of their paths."""
    glossary = Glossary(read_glossary(root / "docs" / "glossary.md"))
    return [check_file(root, path, glossary) for path in sorted(prose_files(root))]


def check_file(root: Path, path: str, glossary: Glossary) -> Report:
    """Check the prose of the file ``path`` (relative to ``root``), and return its findings in the order of lines."""
    texts = READERS[Path(path).suffix]((root / path).read_text(encoding="utf-8"))
    divided = [(text.kind, blocks(text)) for text in texts]
    findings = [finding for kind, pieces in divided for finding in check_text(kind, pieces, glossary)]
    words = sum(block.words for _, pieces in divided for block in pieces)
    return Report(path, words, sorted(findings, key=lambda finding: finding.line))


def prose_files(root: Path) -> Iterator[str]:
    """Yield the paths, relative to ``root``, of all files with prose of ours that the check can read.

    Generated pages and hidden folders are left out.
    """
    for folder, folders, names in os.walk(root):
        # Hidden folders are environments and caches.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_OURS]
        for name in names:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if Path(name).suffix in READERS and path not in GENERATED:
                yield path
