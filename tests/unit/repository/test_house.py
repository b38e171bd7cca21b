"""The figures of the structure count what their definitions say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.house.command import main
from tools.house.measure import FIGURES, House, measure

PARTS = """
from dataclasses import dataclass
from enum import Enum

class Tiers:
    def store(self): ...

class NoTiers(Tiers): ...

class Kind(Enum):
    A = 1
    def text(self): ...

class Memory:
    def __init__(self, tiers: Tiers | None, kind: Kind | None, number: int | None):
        self._tiers, self.kind = tiers, kind
        self.number = number
        self.late: Tiers | None = None

    def set(self, late):
        self.late = late
"""


def measured(folder: Path, **files: str) -> House:
    """Measure a repository; the file ``a__b`` is ``room/a/b.py``."""
    for name, text in {"__init__": "", **files}.items():
        path = folder / "room" / (name if name == "__init__" else name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text, encoding="utf-8")
    return measure(folder)


def test_imports_between_files_and_folders_of_a_room(tmp_path):
    house = measured(
        tmp_path,
        low="x = 1",
        sub__one="from ..low import x\nfrom .two import y\nimport os\n",
        sub__two="def f():\n    from ..high import z\n",
        high="from .sub.one import y\nfrom pdserve.room.low import x\nfrom . import low\n",
    )
    figures = house.rooms["room"]
    assert (figures["sub-rooms"], figures["arrows"], figures["up"], figures["mutual"]) == (3, 4, 1, 1)
    assert house.places["mutual"] == ["room.high -> room.sub"]


def test_without_cycles_nothing_runs_up(tmp_path):
    files = {f"m{i}": "".join(f"from .m{j} import x\n" for j in range(i)) for i in range(12)}
    assert measured(tmp_path, **files).total["up"] == 0


@pytest.mark.parametrize(("arrows", "up"), [("ab ba", 1), ("ab bc ca", 1), ("ab bc ca ba cb", 2), ("ab ba cd dc", 2)])
def test_the_order_leaves_as_few_arrows_up_as_can_be(tmp_path, arrows, up):
    files = {name: "".join(f"from .{to} import x\n" for at, to in arrows.split() if at == name) for name in "abcd"}
    assert measured(tmp_path, **files).total["up"] == up


def test_large_classes_functions_and_files(tmp_path):
    body = "    x = 1\n"
    house = measured(
        tmp_path,
        a="class A:\n" + body * 299 + "class B:\n" + body * 300,
        b="def f():\n" + body * 59 + "async def g():\n" + body * 60,
        c="x = 1\n" * 500,
        d="x = 1\n" * 501,
    )
    assert [house.total[key] for key in ("classes", "functions", "files")] == [1, 1, 2]
    assert house.places["classes"] == ["room/a.py:301: B, 301"]
    assert house.places["functions"] == ["room/b.py:61: g, 61"]


def test_the_widest_class_counts_what_it_inherits(tmp_path):
    base = "class Base:\n    def a(self): ...\n    def b(self): ...\n    def _c(self): ...\n"
    house = measured(
        tmp_path,
        base=base,
        sub="from .base import Base\nclass Sub(Base):\n    def b(self): ...\n    @property\n    def d(self): ...\n",
    )
    assert house.total["widest"] == 3


def test_names_with_two_meanings(tmp_path):
    house = measured(tmp_path, a="class A: ...\nclass B: ...\n", b="class A: ...\n")
    assert house.total["names"] == 1
    assert house.places["names"] == ["room/a.py:1: A, 1", "room/b.py:1: A, 1"]


@pytest.mark.parametrize(
    "guard",
    [
        "memory._tiers is not None",
        "tiers is None",
        "None is memory.tiers",
        "1 if tiers else 2",
        "tiers and tiers.store()",
        "not memory.tiers",
        "isinstance(memory.tiers, Tiers)",
        "isinstance(x, NoTiers)",
        "isinstance(x, int | parts.NoTiers)",
        "type(x) is NoTiers",
        "x is NO_TIERS",
    ],
)
def test_a_branch_on_an_optional_part_is_a_guard(tmp_path, guard):
    assert measured(tmp_path, parts=PARTS, use=f"y = {guard}\n").total["guards"] == 1


@pytest.mark.parametrize(
    "branch",
    [
        "memory.kind is None",
        "memory.number is None",
        "memory.late is None",
        "isinstance(x, NoTiersError)",
        "tiers == 3",
        "x if y else tiers",
    ],
)
def test_a_branch_on_data_or_on_state_is_no_guard(tmp_path, branch):
    assert measured(tmp_path, parts=PARTS, use=f"y = {branch}\n").total["guards"] == 0


def test_asserts_of_presence_and_fragments(tmp_path):
    house = measured(
        tmp_path,
        a='"""Of the store."""\nassert x is not None\nassert y is not None, y\nassert z\ndef f():\n    """Those."""\n',
    )
    assert (house.total["asserts"], house.total["fragments"]) == (2, 2)


def assert_consistent(house: dict) -> None:
    assert house["total"].keys() == FIGURES.keys()
    for key, count in house["total"].items():
        assert (
            key in ("sub-rooms", "arrows", "widest", "names", "files", "fragments")
            or len(house["places"][key]) == count
        )


def test_figures_as_json(tmp_path, capsys):
    measured(tmp_path, parts=PARTS, use="y = tiers is None\nassert y is not None\n", a="class Tiers: ...\n")
    assert main(["--root", str(tmp_path), "--json"]) == 0
    house = json.loads(capsys.readouterr().out)
    assert house["rooms"].keys() == {"room", "tests"}
    assert (house["total"]["guards"], house["total"]["asserts"], house["total"]["names"]) == (1, 1, 1)
    assert_consistent(house)


@pytest.mark.slow
def test_the_repository_is_measured(capsys):
    assert main(["--json"]) == 0
    house = json.loads(capsys.readouterr().out)
    assert {"scheduler", "model_runner", "server", "tests"} <= house["rooms"].keys()
    assert "tools" not in house["rooms"]
    assert_consistent(house)


def test_the_table_names_every_room(tmp_path, capsys):
    measured(tmp_path, a="class A: ...\n")
    assert main(["--root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["room", "tests", "total"]
    assert main(["--root", str(tmp_path), "--list", "widest"]) == 0
