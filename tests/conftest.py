"""Runs before any test module is imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

# The machine that runs the tests has few cores: a team of OpenMP threads with another busy process beside it waits for
# whole scheduler ticks at every barrier. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from support import machine, sampling

from pdserve.runtime.collector import uncollected

# How long examples take, to make or to run, says how busy the machine is: two test files run at a time. Every test has
# a limit of its own.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
# CI judges a change, not the day's luck: there the same examples every time, elsewhere new ones.
settings.register_profile("ci", settings.get_profile("shared"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

LONGEST = [
    *("test_failures", "test_token_identity", "test_tensor_parallel", "test_two_hosts", "test_unlike_engines"),
    *("test_library_backends", "test_kernels_experts", "test_world", "test_kernels_attention", "test_triton_ops"),
    *("test_bootstrap_process", "test_models_page", "test_triton_attention", "test_kernels_layers"),
]
"""Files that take longest, those of real processes and the others. The later they came, the longer one worker would be
alone with the last."""
LEVEL = "kernels_level"
"""Property of a test that ran the kernels at another level than this process: the level's name."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine while it does nothing else; xdist starts its workers afterwards."""
    machine.slowness()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live to the end: each full collection of garbage would walk a million objects for 0.6 s."""
    with uncollected():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """The same for what the files before this one have imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries say what they had to leave behind."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Grids are sampled; each test's own limit is stretched like those inside it; what takes longest comes first.

    Workers take file after file in this order (``--no-loadscope-reorder``): real processes' first. Without it files of
    few tests come last, which are theirs: one worker would be idle while the other is at the longest of all.
    """
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ("e2e" not in item.path.parts, order.get(item.path.stem, len(order))))
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
