"""Measures the structure of each room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..prose.python_texts import python_texts
from ..prose.rules import FRAGMENT, Glossary, check_text
from ..prose.text import Kind, blocks
from .arrows import RoomArrows, room_arrows
from .classes import Classes, asserts_of_presence, long_functions
from .guards import guards, optional_parts
from .source import Module, Place, read_product, read_tests

MAX_FILE_LINES = 500
TESTS = "tests"
FIGURES = {
    "sub-rooms": "folders and files directly inside the room",
    "arrows": "pairs of sub-rooms, one of which imports the other",
    "up": "arrows that run up in the best order found",
    "mutual": "pairs of sub-rooms that import each other",
    "classes": "classes of more than 300 lines",
    "widest": "public methods of the widest class, inherited first-party ones included",
    "functions": "functions of more than 60 lines",
    "guards": "branches on an optional part, null-object type tests included",
    "names": "classes that share their name with another one (benchmark/ left out); total: such names",
    "asserts": "assert … is not None",
    "files": "files of more than 500 lines",
    "fragments": "one-line docstrings that do not stand alone",
}


class House(NamedTuple):
    """All figures, and the places that they count."""

    rooms: dict[str, dict[str, int]]
    total: dict[str, int]
    """Figures of the product, without ``tests``: sums, the widest class, and the names that several classes have."""
    guards_by_part: dict[str, int]
    places: dict[str, list[str]]
    """Places by figure; of "widest", classes of more than 20 public methods."""


def measure(root: Path) -> House:
    """Read the repository at ``root`` and return all figures of its structure, with the places that they count."""
    modules, tests = read_product(root), read_tests(root)
    classes = Classes(modules)
    arrows = {room: room_arrows(room, modules) for room in sorted({module.room for module in modules})}
    named_guards = list(guards(modules, optional_parts(classes)))
    doubles = classes.double_names()
    widths = sorted(classes.widths(), key=lambda place: -place.size)
    places = {
        "classes": list(classes.large()),
        "functions": [place for module in modules for place in long_functions(module)],
        "guards": [place for _, place in named_guards],
        "names": [place for places in doubles.values() for place in places],
        "asserts": [place for module in modules for place in asserts_of_presence(module)],
        "files": list(_long_files([*modules, *tests])),
        "fragments": [place for module in [*modules, *tests] for place in _fragments(module)],
    }
    rooms = {room: _room(room, found, places, widths) for room, found in arrows.items()}
    total = {key: sum(figures[key] for figures in rooms.values()) for key in FIGURES}
    total |= {"widest": widths[0].size if widths else 0, "names": len(doubles)}
    rooms[TESTS] = {key: _count(TESTS, places[key]) for key in ("files", "fragments")}
    shown = {key: [str(place) for place in found] for key, found in places.items()}
    shown["widest"] = [str(place) for place in widths if place.size > 20]
    for key in ("up", "mutual"):
        shown[key] = [f"{pair[0]} -> {pair[1]}" for found in arrows.values() for pair in getattr(found, key)]
    return House(rooms, total, dict(Counter(name for name, _ in named_guards).most_common()), shown)


def _room(room: str, found: RoomArrows, places: dict[str, list[Place]], widths: Iterable[Place]) -> dict[str, int]:
    figures = {
        "sub-rooms": len(found.order),
        "arrows": len(found.arrows),
        "up": len(found.up),
        "mutual": len(found.mutual),
        "widest": max((place.size for place in widths if place.room == room), default=0),
    } | {key: _count(room, counted) for key, counted in places.items()}
    return {key: figures[key] for key in FIGURES}


def _count(room: str, places: Iterable[Place]) -> int:
    return sum(place.room == room for place in places)


def _long_files(modules: Iterable[Module]) -> Iterator[Place]:
    for module in modules:
        if module.lines > MAX_FILE_LINES:
            yield Place(module.path, 1, f"{module.lines} lines", module.lines)


def _fragments(module: Module) -> Iterator[Place]:
    for text in python_texts(module.text, module.tree):
        if text.kind in (Kind.FUNCTION, Kind.DOCSTRING) and "\n" not in text.text.strip():
            for finding in check_text(text.kind, blocks(text), Glossary({})):
                if finding.rule is FRAGMENT:
                    yield Place(module.path, finding.line, finding.phrase)
