"""Prose in a Markdown page: paragraphs, list items, headings and table cells, without code blocks."""

from __future__ import annotations

import re

from .text import Kind, Text

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)
HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TABLE_ROW = re.compile(r"^\s*\|")
HEADING = re.compile(r"^#+ ")


def page_texts(source: str) -> list[Text]:
    """Return every paragraph, list, heading and table cell of a Markdown page, with its line.

    Code blocks are left out.
    """
    for pattern in (FENCE, HTML_COMMENT):
        # Lines keep their numbers.
        source = pattern.sub(lambda match: "\n" * match[0].count("\n"), source)
    texts: list[Text] = []
    held: list[str] = []
    first = 1
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        alone = TABLE_ROW.match(line) or HEADING.match(line)
        if held and (alone or not line.strip()):
            texts.append(Text(first, Kind.PAGE, "\n".join(held)))
            held = []
        if TABLE_ROW.match(line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
            texts += [Text(number, Kind.PAGE, cell) for cell in cells if cell.strip("-: ")]
        elif HEADING.match(line):
            texts.append(Text(number, Kind.PAGE, line.lstrip("# ")))
        elif line.strip():
            first = first if held else number
            held.append(line.removeprefix("> "))
    return texts
