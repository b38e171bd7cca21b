"""Runs before any test module is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

# The machine that runs the tests has few cores: a team of OpenMP threads with another busy process beside it waits for
# whole scheduler ticks at every barrier. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from support import machine, sampling

# How long examples take, to make or to run, says how busy the machine is: two test files run at a time. Every test has
# a limit of its own.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
# CI judges a change, not the day's luck: there the same examples every time, elsewhere new ones.
settings.register_profile("ci", settings.get_profile("shared"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

LEVEL = "kernels_level"
"""Property of a test that ran the kernels at another level than this process: the level's name."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine while it does nothing else; xdist starts its workers afterwards."""
    machine.slowness()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Grids are sampled; each test's own limit is stretched like those inside it; what takes longest comes first.

    Two workers take file after file in this order (``--no-loadscope-reorder``). Without it files of few tests come
    last, which are those of real processes: one worker would be idle while the other is at the longest of all.
    """
    items.sort(key=lambda item: "e2e" not in item.path.parts)
    for item in items:
        if not sampling.is_in_sample(item):
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(machine.limit(seconds)), append=False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch has one: threads that wait for each other on busy cores make tests of models many times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_report_header() -> list[str]:
    """What ran these tests: a green run on one processor says little about the code for another."""
    return [
        f"processor: {machine.processor()}, {len(os.sched_getaffinity(0))} cores",
        f"kernels: {machine.kernels()}",
        f"limits: {machine.slowness():.2f} times those written in the tests, as measured here",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeated where the result stands, with what only the end knows: the levels that nobody ran."""
    tested = {
        value
        for report in terminalreporter.stats.get("passed", ())
        for name, value in getattr(report, "user_properties", ())
        if name == LEVEL
    }
    terminalreporter.section("kernels")
    terminalreporter.line(f"{machine.processor()}: {machine.kernels()}")
    terminalreporter.line(f"levels {machine.levels(tested)}")
