"""No import runs up, none in a circle: what stands below can be read, tested and changed without what stands above.

``FLOORS`` has the folders in their order, the lowest first. Folders and files directly inside one of them have no given
order, but they must have one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.import_arrows import FLOORS, circles, read_arrows, running_up

from tools.house.arrows import room_arrows
from tools.house.source import read_product

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def arrows():
    return read_arrows(ROOT)


def test_no_import_runs_up(arrows):
    assert not running_up(arrows)


def test_no_import_runs_in_a_circle(arrows):
    assert not circles(arrows)


def test_every_floor_is_there_and_read(arrows):
    assert {a.source.split(".")[0] for a in arrows} | {"messages"} == set(FLOORS)


@pytest.fixture(scope="module")
def modules():
    return read_product(ROOT)


@pytest.mark.parametrize("folder", [folder for folder in FLOORS if folder != "tools"])
def test_no_import_between_parts_of_a_folder_runs_up(arrows, modules, folder):
    found = room_arrows(folder, modules)
    wrong = {*found.up, *found.mutual}
    assert not wrong, [str(a) for a in arrows if (part_of(a.source), part_of(a.target)) in wrong]


def part_of(module: str) -> str:
    """Return the folder or file directly inside a top-level folder that ``module`` lies in."""
    return ".".join(module.split(".")[:2])


def test_a_mutual_import_of_two_parts_of_a_folder_is_named(tmp_path):
    root = made(tmp_path, router__a__x="from ..b.y import z\n", router__b__y="z = 1\n", router__c="u = 1\n")
    assert room_arrows("router", read_product(root)).up == []
    made(root, router__b__w="from ..a.v import u\n", router__a__v="u = 1\n")
    assert room_arrows("router", read_product(root)).mutual == [("router.a", "router.b")]


def test_only_the_bench_commands_import_the_benchmarks(arrows):
    users = {a.source for a in arrows if a.target.split(".")[0] == "benchmark"}
    assert {user for user in users if user.split(".")[0] not in ("benchmark", "tools")} == {"server.bench_cli"}
    # The command line names it as text, and loads it when it is asked for.
    assert not [str(a) for a in arrows if a.target == "server.bench_cli"]


def made(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.joinpath("__init__.py").touch()
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "line",
    [
        "from ..scheduler.req import Req",
        "from ..scheduler import req",
        "from pdserve.scheduler.req import Req",
        "import pdserve.scheduler.req",
        "if TYPE_CHECKING:\n    from ..scheduler.req import Req",
        "def f():\n    from ..scheduler.req import Req",
    ],
)
def test_a_turned_arrow_is_named(tmp_path, line):
    root = made(tmp_path, scheduler__req="class Req: ...\n", mem_cache__pool=line + "\n")
    [problem] = {p.split(", which")[0].split(":")[0] for p in running_up(read_arrows(root))}
    assert problem == "mem_cache/pool.py"
    assert "scheduler/ stands above mem_cache/" in running_up(read_arrows(root))[0]
    turned = made(tmp_path, scheduler__req="from ..mem_cache.pool import x\n", mem_cache__pool="x = 1\n")
    assert not running_up(read_arrows(turned))


@pytest.mark.parametrize("line", ["from tools.text import x", "import tools.text", "from ..tools import text"])
def test_the_product_imports_no_tools(tmp_path, line):
    root = made(tmp_path, router__a=line + "\n", tools__text="x = 1\n")
    assert running_up(read_arrows(root))[0].startswith("router/a.py:1 imports tools")


def test_a_circle_within_a_folder_is_named(tmp_path):
    root = made(tmp_path, router__a="from .b import x\n", router__b="from .c import x\n", router__c="from . import a\n")
    assert len(circles(read_arrows(root))) == 3
    assert not circles(read_arrows(made(tmp_path, router__c="x = 1\n")))


def test_a_folder_without_a_floor_is_named(tmp_path):
    root = made(tmp_path, attic__a="from ..messages.base import Message\n", messages__base="class Message: ...\n")
    assert "give attic/ a place" in running_up(read_arrows(root))[0]
