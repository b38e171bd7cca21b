"""Run directories: private, locked while their server lives, and removed by the next server if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from pdserve.runtime.run_dir import RunDir, remove_stale_run_dirs, run_dirs_of

NO_PROCESS = 4_194_305
"""A process number that Linux never gives: what a living server of another container looks like from here."""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr("pdserve.runtime.run_dir.run_dir_parent", lambda: folder)
    return folder


def test_a_living_server_s_directory_stays_whatever_its_process_number_looks_like_from_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: NO_PROCESS)
    living = RunDir()
    assert living.path.stat().st_mode & 0o777 == 0o700
    another = RunDir()
    remove_stale_run_dirs()
    assert living.path.is_dir()
    another.remove()
    living.remove()
    assert not living.path.exists()


def test_a_killed_server_s_directory_goes_even_if_its_number_lives_again(parent: Path) -> None:
    left = parent / f"pdserve-{os.getpid()}-abcdefgh"
    left.mkdir()
    (left / "http.ipc").touch()
    (parent / "pdserve-notes-abcdefgh").write_text("no folder")
    RunDir().remove()
    assert [path.name for path in parent.iterdir()] == ["pdserve-notes-abcdefgh"]


@pytest.mark.parametrize("name", ["pdserve-kv-cache", "pdserve-tiers-abcdefgh", "pdserve-1-store", "pdserve-x-abcdefg"])
def test_a_folder_that_no_server_has_named_stays(parent: Path, name: str) -> None:
    mine = parent / name / "page"
    mine.parent.mkdir()
    mine.touch()
    RunDir().remove()
    assert mine.exists()


def test_a_link_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (parent / "pdserve-1-abcdefgh").symlink_to(tmp_path / "mine")
    remove_stale_run_dirs()
    assert (tmp_path / "mine").is_dir()


def test_a_directory_that_was_removed_before_it_was_locked_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def lock_late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        for path in parent.iterdir():
            shutil.rmtree(path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    made = RunDir()
    assert list(parent.iterdir()) == [made.path]
    made.remove()


def test_a_directory_that_another_server_is_removing_is_not_waited_for(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server that starts took it for one left behind. It may hang while it has the lock."""
    lock = fcntl.flock
    theirs: list[int] = []

    def lock_second(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        (first,) = parent.iterdir()
        theirs.append(os.open(first, os.O_RDONLY))
        lock(theirs[0], fcntl.LOCK_EX)
        lock(fd, how | fcntl.LOCK_NB)

    monkeypatch.setattr(fcntl, "flock", lock_second)
    made = RunDir()
    assert not os.path.samestat(os.fstat(theirs[0]), made.path.stat())
    os.close(theirs[0])
    remove_stale_run_dirs()
    assert list(parent.iterdir()) == [made.path]
    made.remove()


def test_the_directories_of_a_process_are_found_by_its_number(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RunDir()
    (parent / f"pdserve-{os.getpid()}-kv-cache").mkdir()
    (parent / f"pdserve-{os.getpid()}1-abcdefgh").mkdir()
    assert run_dirs_of(os.getpid()) == [own.path]
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert run_dirs_of(NO_PROCESS) == run_dirs_of(os.getpid()) == []
    own.remove()
