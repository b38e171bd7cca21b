"""Locks on files: waited for until another process releases them, or until a limit."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from support.machine import limit

from pdserve.runtime import file_lock
from pdserve.runtime.file_lock import lock_within, try_lock


def test_a_lock_is_taken_when_the_other_process_releases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as theirs, (tmp_path / "lock").open("w") as ours:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert not try_lock(ours.fileno())
        monkeypatch.setattr(file_lock.time, "sleep", lambda seconds: fcntl.flock(theirs, fcntl.LOCK_UN))
        assert lock_within(limit(20), ours.fileno())
        assert not try_lock(theirs.fileno())


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(file_lock.time, "monotonic", lambda: now)
    monkeypatch.setattr(file_lock.time, "sleep", sleep)
    with (tmp_path / "lock").open("w") as theirs, (tmp_path / "lock").open("w") as ours:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert not lock_within(3, ours.fileno())
    assert now == pytest.approx(3, abs=2 * file_lock.POLL_SECONDS)
