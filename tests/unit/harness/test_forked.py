"""Servers of tests are forks of one process, unless they need surroundings of their own."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from support.forked import COMMAND, forks
from support.machine import limit
from support.surroundings import ENVIRONMENT, begin_test, is_unchanged


def test_what_libraries_set_before_a_test_keeps_no_server_from_being_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_LIBRARY", "1")
    assert not is_unchanged(None)
    begin_test()
    assert is_unchanged(None)
    assert is_unchanged({**os.environ, "PYTEST_CURRENT_TEST": "another"})
    assert "A_LIBRARY" not in ENVIRONMENT


def test_a_server_with_another_environment_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_unchanged(None)
    assert not is_unchanged({**os.environ, "A_VARIABLE": "1"})
    monkeypatch.setenv("A_VARIABLE", "1")
    assert not is_unchanged(None)


@pytest.mark.parametrize(
    ("arguments", "code", "says"), [(["version"], 0, version("pdserve")), (["server", "--nonsense"], 2, "--nonsense")]
)
def test_a_fork_is_the_command_and_ends_with_its_code(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = forks().start(COMMAND, arguments, log.fileno())
    assert process.wait(limit(20)) == process.returncode == code
    assert says in (tmp_path / "log").read_text()
