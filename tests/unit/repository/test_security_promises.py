"""docs/security.md: every promise names tests, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "security.md"
TEST = re.compile(r"((?:unit/\w+|e2e)/test_\w+\.py)::(test_\w+)")
SECTION = re.compile(r"^## What a stranger can't do$(.*?)^## ", flags=re.MULTILINE | re.DOTALL)


def promises() -> list[str]:
    """Return the rows of the section's tables, without their heads."""
    [section] = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| can't |")]
    assert len(rows) > 30
    return rows


@cache
def functions_of(file: str) -> dict[str, bool]:
    """Return the tests of a file, and whether each can run, which it can't if it is always skipped."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name: not any(ast.unparse(d).endswith("mark.skip") for d in f.decorator_list) for f in functions}


@pytest.mark.parametrize("row", promises(), ids=lambda row: row.split("|")[1].strip()[:50])
def test_a_promise_says_why_and_names_tests(row: str) -> None:
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert len(cells) == 3
    assert all(cells)
    assert TEST.search(cells[2])
    assert TEST.sub("", cells[2]).strip("`, ") == "", "name tests as unit/FILE.py::TEST"


def test_every_test_that_the_page_names_exists() -> None:
    named = TEST.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [f"{file}::{name}" for file, name in named if not functions_of(file).get(name)] == []
