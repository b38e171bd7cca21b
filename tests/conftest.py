"""Runs before any test module is imported."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath

# The machine that runs the tests has few cores: a team of OpenMP threads with another busy process beside it waits for
# whole scheduler ticks at every barrier. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No process that a test starts imports from the current directory, which is the repository.
os.environ["PYTHONSAFEPATH"] = "1"
# httpx reads it for each client: 40 ms for the certificates of all authorities. Tests ask this machine alone. An
# environment that names certificates of its own is asked first.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("support") / "localhost.pem")
# In the background of a script, SIGINT is ignored, and so it would be in all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import certifi
import pytest
from hypothesis import HealthCheck, settings
from support import machine, sampling, surroundings
from support.examples import examples

from pdserve.runtime.gc_control import uncollected

CERTIFICATES = os.environ["SSL_CERT_FILE"]
certifi.where = lambda: CERTIFICATES
# How long examples take, to make or to run, says how busy the machine is: two test files run at a time. Every test has
# a limit of its own.
settings.register_profile(
    "shared", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
)
settings.load_profile("shared")
# CI judges a change, not the day's luck: there the same examples every time, elsewhere new ones.
settings.register_profile("ci", settings.get_profile("shared"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

LONGEST = [
    *("test_failures", "test_abort_storm", "test_campaign", "test_strangers", "test_structured_output", "test_moves"),
    *("test_sessions", "test_token_identity", "test_examples", "test_store_faults"),
    *("test_cluster", "test_conversation", "test_recorded_answers", "test_tensor_parallel", "test_scripted_tools"),
    *("test_roles", "test_determinism"),
    *("test_triton_compiles", "test_world", "test_triton_ops", "test_models_page", "test_campaigns"),
    *("test_library_backends", "test_kernels_experts", "test_kernels_attention", "test_rank_devices"),
    *("test_bench_kernel", "test_kernels_ranks", "test_gpu_check", "test_handover", "test_model_smollm2"),
]
"""Files that take longest, those of real processes and the others. If they came late, one worker would be alone with
the last."""
TOGETHER = {
    **dict.fromkeys(
        ("test_abort_storm", "test_campaign", "test_strangers", "test_structured_output"), "the pair with small pools"
    ),
    **dict.fromkeys(("test_cluster", "test_conversation"), "the pair with a secret"),
}
"""Files that one worker runs one after another, because they share servers that no other file uses."""
QUARTERS = 4
CAMPAIGN_SECONDS = 900.0
"""Slow tests with this limit or a longer one are campaigns, of up to an hour: ``--slow-quarter`` leaves them out."""
SLOW_MINUTES = 15.0
"""``--slow-quarter`` begins no slow test later than this: the whole run has to end within CI's time."""
LEVEL = "kernels_level"
"""Property of a test that ran the kernels at another level than this process: the level's name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow-quarter``, which CI runs beside ``make test``, and ``--record-answers`` (see the Makefile)."""
    text = f"run the tests that are not slow, and those slow ones whose name's CRC-32 modulo {QUARTERS} is this"
    parser.addoption("--slow-quarter", type=int, choices=range(QUARTERS), help=text)
    parser.addoption("--record-answers", action="store_true", help="write tests/e2e/recorded_answers.jsonl anew")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give files to workers one by one, but those that share servers together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TogetherScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(PurePath(file).stem, file)

    return TogetherScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze what collection makes, because each full collection of garbage would walk a million objects for 0.6 s."""
    with uncollected():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Generator[None]:
    """Leave out of garbage collections what the files before this one have imported."""
    gc.collect()
    gc.freeze()
    yield
    assert gc.isenabled(), "a test of this file has left the garbage collector off"


def pytest_unconfigure() -> None:
    """Unfreeze objects, so that libraries report what they had to leave behind.

    They are collected here. pytest does so twice, and would walk a million objects each time.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sample the grids, choose the quarter, stretch each test's own limit like those inside it, sort.

    Workers take file after file in this order (``--no-loadscope-reorder``). The longest comes first, real processes
    before single parts. In the default order files of few tests come last, which are those of real processes. Then one
    worker would be idle while the other is at the longest of all.
    """
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ("e2e" not in item.path.parts, order.get(item.path.stem, len(order))))
    for item in items:
        if not sampling.is_in_sample(item):
            item.add_marker(pytest.mark.slow)
    quarter = config.getoption("--slow-quarter")
    if quarter is not None:
        left_out = [item for item in items if item.get_closest_marker("slow") and not in_quarter(item, quarter)]
        config.hook.pytest_deselected(items=left_out)
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
    for item in items:
        item.add_marker(pytest.mark.timeout(machine.limit(seconds_of(item))), append=False)


def seconds_of(item: pytest.Item) -> float:
    """Return the limit that is written at the test, or that of all tests."""
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else float(item.config.getini("timeout"))


def in_quarter(item: pytest.Item, quarter: int) -> bool:
    """Return whether ``--slow-quarter`` runs a slow test. A file that moves to another room stays in its quarter.

    A test that divides its own cases has the quarter as a parameter.
    """
    own = getattr(item, "callspec", None)
    if own is not None and "quarter" in own.params:
        return own.params["quarter"] == quarter and seconds_of(item) < CAMPAIGN_SECONDS
    kind = item.path.relative_to(item.config.rootpath).parts[1]
    name = f"tests/{kind}/{item.path.name}::{item.nodeid.partition('::')[2]}"
    return zlib.crc32(name.encode()) % QUARTERS == quarter and seconds_of(item) < CAMPAIGN_SECONDS


BEGUN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what is left of the quarter when its time is over."""
    surroundings.begin_test()
    over = time.monotonic() > BEGUN + 60 * SLOW_MINUTES
    if over and item.config.getoption("--slow-quarter") is not None and item.get_closest_marker("slow"):
        pytest.skip(f"a slow test of the quarter, whose {SLOW_MINUTES:.0f} minutes are over")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch has one: threads that wait for each other on busy cores make tests of models many times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return what runs these tests: a green run on one processor says little about the code for another."""
    quarter = config.getoption("--slow-quarter")
    return [
        *([] if quarter is None else [f"slow tests: quarter {quarter} of {QUARTERS}, without campaigns"]),
        f"processor: {machine.processor()}, {len(os.sched_getaffinity(0))} cores",
        f"kernels: {machine.kernels()}",
        f"deadlines: {machine.PATIENCE:.0f} times those written in the tests, at least {machine.LEAST_SECONDS:.0f} s",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeat the header beside the result, with the levels of kernels that no test ran."""
    tested = {
        value
        for report in terminalreporter.stats.get("passed", ())
        for name, value in getattr(report, "user_properties", ())
        if name == LEVEL
    }
    terminalreporter.section("kernels")
    terminalreporter.line(f"{machine.processor()}: {machine.kernels()}")
    terminalreporter.line(f"levels {machine.levels(tested)}")
