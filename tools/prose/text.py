"""Pieces of prose, and how they divide into blocks and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

NO_PROSE = re.compile(r"(`+)[^`]+?\1|(?<=\])\([^)\s]*\)|https?://\S+")
"""Inline code, targets of links, and URLs."""
WORD = re.compile(r"\S*\w\S*")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\.\w\.)[\"')\]]*(?:\s+(?=[A-Z0-9`\"'(\[]|--\w|[a-z][\w-]*: )|[ \t]*\n\s*)")
"""End of a sentence. The next one may begin with an option, with a word and a colon, or with any word on a new line."""
BULLET = re.compile(r"\s*([-*•]|\d+\.)\s")
DRAWING = re.compile(r"[─│├└┌┐┘┤▶◀▼▲]|^\s*(\||\+-|>>>|-{3,}|={3,})")
COLUMNS = "   "
"""Spaces that only a table or a drawing has between words."""


class Kind(Enum):
    """Where a text stands, which decides how it has to begin."""

    FUNCTION = auto()
    """Docstring of a function that has to begin with a verb."""
    DOCSTRING = auto()
    """Docstring of a module, class, constant, field, property, fixture or test."""
    HELP = auto()
    """Help text of an option or a metric."""
    COMMENT = auto()
    PAGE = auto()
    """A paragraph, list item, heading or table cell of a Markdown page."""


class Text(NamedTuple):
    """A piece of prose that begins at line ``line`` of its file."""

    line: int
    kind: Kind
    text: str


class Sentence(NamedTuple):
    """A sentence on line ``line`` of its file; inline code counts as one word."""

    line: int
    text: str
    words: int


class Block(NamedTuple):
    """A paragraph or list item that begins at line ``line`` of its file."""

    line: int
    text: str
    mask: str
    """The text with inline code, targets of links and URLs replaced by one word of equal length."""

    @property
    def words(self) -> int:
        """Number of words in the block."""
        return len(WORD.findall(self.mask))

    def line_of(self, position: int) -> int:
        """Return the line of the file that the character at ``position`` stands on."""
        return self.line + self.text.count("\n", 0, position)

    def sentences(self) -> Iterator[Sentence]:
        """Yield the sentences in their order."""
        begin = 0
        for match in [*SENTENCE_END.finditer(self.mask), None]:
            end = match.start() if match else len(self.text)
            words = len(WORD.findall(self.mask, begin, end))
            yield Sentence(self.line_of(begin), " ".join(self.text[begin:end].split()), words)
            begin = match.end() if match else end


def blocks(text: Text) -> list[Block]:
    """Divide a text into its paragraphs and list items.

    Drawings, rulers, and code that is indented below a line ending in ``::`` are no prose and are left out.
    """
    return [Block(text.line + start, block, _masked(block)) for start, block in _divide(text.text)]


def _masked(text: str) -> str:
    return NO_PROSE.sub(_mask, text) if "`" in text or "](" in text or "://" in text else text


def _mask(match: re.Match[str]) -> str:
    return "`" + re.sub(r"\S| ", "x", match[0][1:-1]) + "`"


def _divide(text: str) -> Iterator[tuple[int, str]]:
    lines: list[str] = []
    start = indent = 0
    literal = in_bullet = False
    for number, line in enumerate([*text.splitlines(), ""]):
        content = line.strip()
        depth = len(line) - len(line.lstrip())
        bullet = BULLET.match(line) is not None
        drawn = DRAWING.search(line) is not None or COLUMNS in content
        literal = literal and (not content or depth > 0)
        new_depth = bool(lines) and (depth < indent if in_bullet else depth != indent)
        if lines and (not content or bullet or drawn or literal or new_depth):
            literal = literal or lines[-1].rstrip().endswith("::")
            yield start, "\n".join(lines)
            lines = []
        if not content or drawn or (literal and depth > 0):
            continue
        if not lines:
            start, indent, in_bullet = number, depth, bullet
        lines.append(line)
