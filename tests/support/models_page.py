"""Writes the tables of docs/models.md: measures every config, and asks for what is refused. See ``make models``.

With names of configs it measures those alone, and leaves what the page says of others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import transformers

from . import model_tables
from .families import FAMILIES
from .foreign import SERVED
from .model_refusals import REFUSED, asked
from .model_rows import COLUMNS, ENGINES, FOREIGN, FOREIGN_COLUMNS, Row, measure, measure_foreign
from .model_tables import Key, Refused

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


class Page(NamedTuple):
    """What the tables say that has been measured, and asked."""

    rows: dict[Key, Row]
    foreign: dict[Key, Row]
    refused: Refused


def keys() -> list[Key]:
    """Return the keys of every row that the page has to have."""
    return [(name, engine) for name in FAMILIES for engine in ENGINES]


def foreign_keys() -> list[Key]:
    """Return the keys of every row of transformers' own classes."""
    return [(name, FOREIGN) for name in SERVED]


def read(text: str) -> Page:
    """Read the tables of a page."""
    sections = dict(re.findall(_marked(r"([\w ]+)"), text, flags=re.DOTALL))
    return Page(
        model_tables.read_figures(sections.get("figures", ""), COLUMNS),
        model_tables.read_figures(sections.get("figures by transformers", ""), FOREIGN_COLUMNS),
        model_tables.read_refusals(sections.get("refusals", "")),
    )


def written(text: str, page: Page) -> str:
    """Return the page with these tables between its markers. Rows come in the order of the configs."""
    sections = {
        "families": model_tables.families(),
        "configs": model_tables.configs(),
        "figures": model_tables.figures(_in_order(page.rows, keys()), COLUMNS),
        "configs by transformers": model_tables.foreign_configs(),
        "figures by transformers": model_tables.figures(_in_order(page.foreign, foreign_keys()), FOREIGN_COLUMNS),
        "refusals": model_tables.refusals(page.refused),
    }
    for name, section in sections.items():
        found = re.search(_marked(f"({name})"), text, flags=re.DOTALL)
        if found is None:
            raise ValueError(f"the page has no markers of {name!r}")
        text = text[: found.start(2)] + section + text[found.end(2) :]
    return text


def main(names: Sequence[str]) -> int:
    """Measure the configs ``names`` (none: all, and the refusals).

    Returns 0 if every row is right and the page is written.
    """
    # Threads that wait for each other cost more than such small products.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    text = PAGE.read_text(encoding="utf-8")
    page = read(text)
    rows, foreign = dict(page.rows), dict(page.foreign)
    for name in names or [*FAMILIES, *SERVED]:
        print(f"measuring {name}", flush=True)
        if name in FAMILIES:
            rows |= {(name, engine): row for engine, row in measure(name).items()}
        else:
            foreign[name, FOREIGN] = measure_foreign(name)
    wrong = [
        f"{config} by {engine}: {problem}"
        for (config, engine), row in (rows | foreign).items()
        for problem in model_tables.mistakes(row)
    ]
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    refused = page.refused if names else ask_all()
    PAGE.write_text(written(text, Page(rows, foreign, refused)), encoding="utf-8")
    return 0


def ask_all() -> Refused:
    """Collect the message of every refusal."""
    found: Refused = {}
    for heading, asks in REFUSED.items():
        print(f"asking for what is refused: {heading}", flush=True)
        found[heading] = {}
        for what, ask in asks.items():
            with TemporaryDirectory() as folder:
                found[heading][what] = asked(ask, Path(folder))
    return found


def _marked(name: str) -> str:
    """Matches a section: its name, and what stands between its markers."""
    return rf"<!-- {name}: written by `make models` -->\n\n(.*?)\n\n<!-- as far as here -->"


def _in_order(rows: dict[Key, Row], order: Iterable[Key]) -> dict[Key, Row]:
    return {key: rows[key] for key in order if key in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
