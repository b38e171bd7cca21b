"""Servers of tests are forks of one process, unless they need surroundings of their own."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from support.forked import COMMAND, can_fork, forks
from support.machine import limit


def test_what_tests_import_keeps_no_server_from_being_a_fork() -> None:
    for name in ("torch", "transformers", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    assert can_fork(None)


def test_a_server_with_another_environment_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork({**os.environ, "PYTEST_CURRENT_TEST": "another"})
    assert not can_fork({**os.environ, "A_VARIABLE": "1"})
    monkeypatch.setenv("A_VARIABLE", "1")
    assert not can_fork(None)


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
