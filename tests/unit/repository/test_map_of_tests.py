"""tests/README.md names every folder of tests and every helper, and nothing that is gone."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
NAMED = re.compile(r"`(\w+(?:\.py|/)|unit/\w+/)`")


def test_the_map_names_every_helper_and_every_folder() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    folders, _, helpers = text.partition("## Support")
    there = {f"{path.name}/" for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    assert {name.partition("/")[0] + "/" for name in NAMED.findall(folders) if name.endswith("/")} == there
    support = {
        path.name + "/" * path.is_dir() for path in (TESTS / "support").iterdir() if not path.name.startswith("_")
    }
    modules = {name for name in support if name.endswith((".py", "/"))}
    assert set(NAMED.findall(helpers)) == modules
