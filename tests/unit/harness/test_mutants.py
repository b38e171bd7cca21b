"""The tool behind ``make mutants``: what it changes in a source, and how it puts a recording together."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from mutants.recording import evaluate
from mutants.sites import SWITCH, Site, draw, find_sites, plant

SOURCE = '''
"""A module."""
from __future__ import annotations

MOST: int = 7


def f(a: int, b: list[int] = []) -> int:
    """Says nothing."""
    if a < MOST and not b:
        b.append(a + 1)
    elif f"{a + 1}" == "ß": raise ValueError(a)
    assert a > 3
    total = 0
    for i in range(len(b)):
        total += max(
            a,
            i,
        )
    log.info("total %d", 5)
    return g(total, b[a:])
'''


def sites() -> list[Site]:
    return find_sites("room/file.py", SOURCE)


def test_every_kind_of_change_is_found_and_texts_types_assertions_and_logs_are_left_alone() -> None:
    found = {(site.kind, site.before, site.after) for site in sites()}
    assert found >= {
        ("constant", "7", "8"),
        ("comparison", "a < MOST", "a <= MOST"),
        ("and/or", "a < MOST and not b", "a < MOST or not b"),
        ("negated condition", "a < MOST and not b", "not (a < MOST and not b)"),
        ("arithmetic", "a + 1", "a - 1"),
        ("removed statement", "b.append(a + 1)", "pass"),
        ("off by one", "len(b)", "len(b) - 1"),
        ("off by one", "a", "a + 1"),
        ("swapped arguments", "g(total, b[a:])", "g(b[a:], total)"),
    }
    lines = SOURCE.splitlines()
    touched = {lines[site.start[0] - 1].strip() for site in sites()}
    assert "assert a > 3" not in touched
    assert not any("5" in site.before for site in sites() if site.kind == "constant")
    # A statement that shares its line with another has no room for a condition of its own.
    assert ("removed statement", "raise ValueError(a)", "pass") not in found


@pytest.mark.parametrize("site", sites(), ids=lambda site: site.key)
def test_a_planted_mutant_compiles_and_moves_no_line(site: Site) -> None:
    text = plant(SOURCE, {3: site})
    compile(text, "file.py", "exec")
    assert SWITCH.format(3) in text
    moved = site.after.count("\n")
    assert text.count("\n") == SOURCE.count("\n") + moved


def test_a_seed_stands_for_one_draw_in_which_no_mutant_is_inside_another() -> None:
    many = [*sites(), *find_sites("other/file.py", SOURCE)]
    drawn = draw(many, 12, 5)
    assert drawn == draw(many, 12, 5) != draw(many, 12, 6)
    assert {site.room for site in drawn} == {"room", "other"}
    ast.parse(plant(SOURCE, dict(enumerate(site for site in drawn if site.room == "room"))))


def test_a_recording_says_which_tests_reach_a_mutant_the_cheapest_in_the_same_process_first(tmp_path: Path) -> None:
    windows = tmp_path / "windows"
    windows.mkdir()
    recorded = {
        "10": [("slow", 0, 9, True), ("quick", 9, 10, True), ("fails", 10, 11, False)],
        "20": [("other", 8, 9, True)],
    }
    for pid, tests in recorded.items():
        (windows / pid).write_text("".join(json.dumps(test) + "\n" for test in tests))
    # 10 is a process of tests. 99 was started by one of several tests.
    (tmp_path / "log").write_text("10 0 5.0\n10 0 9.5\n10 0 10.5\n99 0 8.5\n99 1 20.0\n")
    found = evaluate(windows, tmp_path / "log")
    assert found.reached == {0: ["quick", "slow", "other"], 1: []}
    assert found.failed == ["fails"]
