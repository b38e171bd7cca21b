"""The number of threads of a team while other processes take cores from it."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pdserve.model_runner.cpu_engine import team_sizing
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.cpu_engine.team_sizing import (
    LEAST_HOLD_SECONDS,
    MOST_HOLD_SECONDS,
    WINDOW_SECONDS,
    TeamSizing,
    ThreadTime,
    best_size,
)
from pdserve.model_runner.sampling.native import NativeSampler

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    ("capacity", "taken", "size"),
    [
        *((2, 0.0, 2), (2, 0.3, 2), (2, 0.5, 1), (2, 1.0, 1), (2, 2.0, 1)),
        *((16, 0.05, 16), (16, 0.5, 15), (16, 1.0, 15), (16, 1.5, 14), (16, 8.0, 8), (1, 0.9, 1)),
    ],
)
def test_as_many_threads_as_there_are_cores_for(capacity: int, taken: float, size: int) -> None:
    assert best_size(capacity, taken) == size


class Clock:
    """Threads that compute, one of which waits for its core a part of the time if others have it."""

    def __init__(self, capacity: int = 2) -> None:
        self.sizing = TeamSizing(capacity)
        self.now = 0.0
        self.times = [ThreadTime(0.0, 0.0)] * capacity

    def compute(self, seconds: float, waits: float = 0.0) -> list[int]:
        """Compute for some seconds and look every 50 ms. ``waits``: part of them that the last thread waits.

        Return the sizes.
        """
        sizes = []
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            *others, last = self.times
            self.times = [ThreadTime(t.run + 0.05, t.waited) for t in others]
            self.times.append(ThreadTime(last.run + 0.05 * (1 - waits), last.waited + 0.05 * waits))
            sizes.append(self.sizing.look(self.now, self.times))
        return sizes


def test_all_threads_compute_if_none_waits() -> None:
    clock = Clock()
    assert set(clock.compute(5.0)) == {2}
    assert not clock.sizing.is_short


def test_fewer_threads_compute_soon_after_a_core_is_taken_and_all_soon_after_it_is_free() -> None:
    clock = Clock()
    clock.compute(1.0)
    sizes = clock.compute(0.4, waits=0.5)
    assert sizes[-1] == 1
    assert clock.sizing.is_short
    assert clock.sizing.taken == pytest.approx(0.5)
    assert clock.compute(LEAST_HOLD_SECONDS + 2 * WINDOW_SECONDS)[-1] == 2
    assert not clock.sizing.is_short


def test_all_threads_are_tried_again_less_and_less_often() -> None:
    clock = Clock()
    sizes = clock.compute(60.0, waits=0.6)
    tried = [i * 0.05 for i in range(1, len(sizes)) if sizes[i - 1] < sizes[i]]
    pauses = [round(after - before, 3) for before, after in pairwise(tried)]
    assert pauses == sorted(pauses)
    assert MOST_HOLD_SECONDS <= pauses[-1] <= MOST_HOLD_SECONDS + 4 * WINDOW_SECONDS
    assert sizes.count(2) < 0.05 * len(sizes)


def test_a_thread_that_idles_is_no_sign_of_a_taken_core() -> None:
    clock = Clock()
    clock.compute(1.0)
    for _ in range(40):
        clock.now += 0.05  # neither runs nor waits
        assert clock.sizing.look(clock.now, clock.times) == 2


def test_a_team_computes_with_any_of_its_threads_and_with_the_same_results() -> None:
    team, rng = Team(4, spin_us=1), np.random.default_rng(1)
    logits = rng.standard_normal((64, 1000)).astype(np.float32)
    rows = list(range(64))
    expected = NativeSampler().log_sums(logits, rows)
    sampler = NativeSampler(team)
    for size in [4, 1, 3, 1, 1, 2, 4, 2, 3, 4] * 20:
        team.size = size
        np.testing.assert_array_equal(sampler.log_sums(logits, rows), expected)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="of 4 threads"):
            team.size = wrong


def test_the_sizer_reads_each_threads_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[ThreadTime]] = []
    monkeypatch.setattr(TeamSizing, "look", lambda _, __, times: seen.append(times) or 1)
    monkeypatch.setattr(team_sizing, "LOOK_SECONDS", 0.0)
    team = Team(2, adapts=True)
    team.begin_pass()
    assert team.size == 1
    begin = seen[-1][0].run
    while seen[-1][0].run < begin + 0.02:  # the calling thread is the first
        team.begin_pass()
    own = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    assert seen[-1][0].run <= int(own[0]) / 1e9
    assert {int(task) for task in os.listdir("/proc/self/task")} >= {threading.get_native_id(), team.system_id(1)}


def test_fewer_threads_are_bound_to_no_core_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    sizes = iter([1, 2])
    monkeypatch.setattr(TeamSizing, "look", lambda *_: next(sizes))
    monkeypatch.setattr(team_sizing, "LOOK_SECONDS", 0.0)
    team = Team(2, cores[:2], adapts=True)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores[:1])
        team.begin_pass()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(team.system_id(1)) == set(cores[:2])
        team.begin_pass()
        assert (os.sched_getaffinity(0), os.sched_getaffinity(team.system_id(1))) == ({cores[0]}, {cores[1]})
    finally:
        os.sched_setaffinity(0, before)


def test_a_core_that_leaves_the_cpuset_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel answers EINVAL for a core that the process may not use, as for one that does not exist."""
    before, gone = os.sched_getaffinity(0), 1000
    first = min(before)
    sizes = iter([1, 2, 1, 2])
    monkeypatch.setattr(TeamSizing, "look", lambda *_: next(sizes))
    monkeypatch.setattr(team_sizing, "LOOK_SECONDS", 0.0)
    team = Team(2, [first, gone], adapts=True)
    try:
        for size in (1, 2, 1, 2):
            team.begin_pass()
            assert team.size == size
            assert os.sched_getaffinity(team.system_id(1)) == {first}
        assert os.sched_getaffinity(0) == {first}
    finally:
        os.sched_setaffinity(0, before)
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"core {gone}" in line


def test_a_system_that_does_not_tell_keeps_all_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(team_sizing.os, "pread", lambda *_: b"0")
    before = len(os.listdir("/proc/self/fd"))
    team = Team(2, adapts=True)
    with caplog.at_level("INFO"):
        team.begin_pass()
        team.begin_pass()
    assert team.size == 2
    assert [record.message for record in caplog.records if "do not adapt" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_with_the_team() -> None:
    before = len(os.listdir("/proc/self/fd"))
    team = Team(2, adapts=True)
    team.begin_pass()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del team
    assert len(os.listdir("/proc/self/fd")) == before
