"""Folders and files that somebody else may have filled are not used: stores, sessions, and the cache of kernels.

What belongs to this user is made to look like another's by changing who this user is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.mem_cache.storage.base import StoreMisconfigured
from pdserve.mem_cache.storage.file_store import FileStore
from pdserve.model_files.checkpoint import checkpoint_files
from pdserve.model_files.errors import InvalidWeights
from pdserve.model_runner.kernels import build
from pdserve.runtime.trusted_path import distrust, make_private_folder
from pdserve.server.http.session_files import Limits, SessionFiles
from pdserve.terminal.check import kernels

LIMITS = Limits(total=1 << 20, quota=1 << 20, ttl=60.0)
PAGE = 64
HASH = bytes(16)


@pytest.fixture
def somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this user has made belongs to another one from now on."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 4321)
    real_fstat, real_stat, real_lstat = os.fstat, Path.stat, Path.lstat

    def foreign(state: os.stat_result) -> os.stat_result:
        fields = list(state)
        fields[4] = 1234
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", lambda fd: foreign(real_fstat(fd)))
    monkeypatch.setattr(Path, "stat", lambda path, **how: foreign(real_stat(path, **how)))
    monkeypatch.setattr(Path, "lstat", lambda path: foreign(real_lstat(path)))


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_private_folder(tmp_path / "a" / "b")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="chmod go-w"):
        make_private_folder(tmp_path)
    with pytest.raises(StoreMisconfigured, match="others than its owner may write"):
        FileStore(tmp_path, PAGE, 1 << 20)
    with pytest.raises(PermissionError):
        SessionFiles(tmp_path, LIMITS)


@pytest.mark.usefixtures("somebody_else")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    assert "belongs to user 1234" in distrust(tmp_path.stat())
    with pytest.raises(StoreMisconfigured, match="belongs to user 1234"):
        FileStore(tmp_path, PAGE, 1 << 20)
    with pytest.raises(PermissionError, match="belongs to user 1234"):
        SessionFiles(tmp_path, LIMITS)


def test_a_page_that_somebody_else_put_there_is_no_hit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = FileStore(tmp_path, PAGE, 1 << 20)
    page, into = bytearray(b"x" * PAGE), bytearray(PAGE)
    store.set([HASH], [memoryview(page)])
    assert store.get([HASH], [memoryview(into)]) == 1
    request.getfixturevalue("somebody_else")
    assert store.get([HASH], [memoryview(into)]) == 0
    assert store.usage()[2] == 1
    store.close()


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreMisconfigured):
        FileStore(tmp_path, PAGE, 1 << 20)
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of this processor's level in the cache of kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
    path = build.library_path(build.LEVELS[-1])
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no library")
    path.chmod(0o755)
    return path


def test_a_library_of_ours_is_used(planted: Path) -> None:
    assert build.build(build.LEVELS[-1]) == planted


@pytest.mark.parametrize("place", ["folder", "library"])
def test_a_library_that_others_may_have_written_is_never_loaded(planted: Path, place: str) -> None:
    target = planted if place == "library" else planted.parent
    target.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{target.name} is not used: others than its owner"):
        build.build(build.LEVELS[-1])


def test_the_library_of_somebody_else_is_never_loaded(planted: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("somebody_else")
    with pytest.raises(build.BuildError, match="belongs to user 1234"):
        build.build(build.LEVELS[-1])


def test_the_check_names_a_library_that_is_not_used(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "choose_level", lambda: build.LEVELS[-1])
    planted.chmod(0o777)
    assert not kernels.can_use_kernels()
    [finding] = kernels.look_at_kernels()
    assert "is not used" in finding.text


@pytest.mark.parametrize("name", ["../other.safetensors", "/dev/zero", "sub/part.safetensors", ".."])
def test_a_checkpoint_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidWeights, match="beside its index"):
        checkpoint_files(tmp_path)
