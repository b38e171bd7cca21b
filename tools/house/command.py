"""Prints the figures of the product's structure, room by room.

The definitions stand at the top of ``arrows.py``, ``classes.py`` and ``guards.py`` in ``tools/house/``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .measure import FIGURES, House, measure

MAX_PARTS = 12
"""Optional parts shown below the table, those with the most guards."""


def main(arguments: list[str] | None = None) -> int:
    """Measure the structure of the repository, and print its table, or what the options ask for. Return 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print every figure and every place that it counts")
    parser.add_argument("--list", choices=sorted(FIGURES), metavar="FIGURE", help="print the places of one figure")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    options = parser.parse_args(arguments)
    house = measure(options.root)
    if options.json:
        print(json.dumps(house._asdict(), indent=1))
    elif options.list:
        print("\n".join(house.places.get(options.list, [])))
    else:
        print(table(house))
    return 0


def table(house: House) -> str:
    """Return the figures as text: a row for each top-level folder, the columns' meanings, and the guards by part."""
    rows = [*house.rooms.items(), ("total", house.total)]
    lines = [f"{'':15}" + "".join(f"{key:>10}" for key in FIGURES)]
    lines += [f"{room:15}" + "".join(f"{figures.get(key, ''):>10}" for key in FIGURES) for room, figures in rows]
    lines += ["", *(f"{key:10}{meaning}" for key, meaning in FIGURES.items())]
    parts = list(house.guards_by_part.items())[:MAX_PARTS]
    lines += ["", "guards by part: " + ", ".join(f"{name} {count}" for name, count in parts)]
    return "\n".join(lines)
