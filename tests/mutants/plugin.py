"""Pytest's part of a recording: when which test ran in which process, and how it ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

failed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--windows", help="folder for one file of each process that runs tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the test's window, with its fixtures."""
    import mutant_switch

    mutant_switch.forget()
    begin = time.monotonic()
    try:
        return (yield)
    finally:
        window = [item.nodeid, begin, time.monotonic(), item.nodeid not in failed]
        with (Path(item.config.getoption("--windows")) / str(os.getpid())).open("a") as file:
            file.write(json.dumps(window) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember failures."""
    if not report.passed:
        failed.add(report.nodeid)
