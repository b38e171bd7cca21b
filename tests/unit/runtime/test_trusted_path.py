"""Folders and files that another user may have filled are not used: stores, sessions, and the cache of kernels.

Changing the user of the test makes this user's files look like another's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.mem_cache.storage.base import StoreMisconfigured
from pdserve.mem_cache.storage.file_store import FileStore
from pdserve.model_files.checkpoint import checkpoint_files
from pdserve.model_files.errors import InvalidWeights
from pdserve.model_runner.cpu_engine import build
from pdserve.router.options import RouterOptions
from pdserve.runtime import trusted_path
from pdserve.runtime.options import OptionError, check_options
from pdserve.runtime.private_cache import publish_sealed
from pdserve.runtime.secret_files import warn_of_exposed_files
from pdserve.runtime.trusted_path import distrust, make_private_folder, read_secret
from pdserve.server.http.session_store.session_files import SessionFiles, SessionLimits
from pdserve.server.log_folder import LogFolder, LogFolderError
from pdserve.server.options import ServerOptions
from pdserve.terminal.access import read_api_key
from pdserve.terminal.check import kernels

LIMITS = SessionLimits(total=1 << 20, quota=1 << 20, ttl=60.0)
PAGE = 64
HASH = bytes(16)


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("another_user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    assert "belongs to user 1234" in distrust(tmp_path.stat())
    with pytest.raises(StoreMisconfigured, match="belongs to user 1234"):
        FileStore(tmp_path, PAGE, 1 << 20)
    with pytest.raises(PermissionError, match="belongs to user 1234"):
        SessionFiles(tmp_path, LIMITS)


KEYS = {"api_key_file": "alice a-key", "admin_key_file": "the-admin", "cluster_secret_file": "x" * 32}
KEYS |= {"hicache_storage_url_file": "redis://127.0.0.1/0", "hicache_storage_key_file": "x" * 32}


@pytest.fixture
def secret_files(tmp_path: Path) -> dict[str, Any]:
    for name, text in KEYS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in KEYS}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_or_secret_that_others_may_read_or_write_is_warned_of_once(
    secret_files: dict[str, Any], mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(**secret_files)
    warn_of_exposed_files(options)
    assert caplog.messages == []
    for path in secret_files.values():
        Path(path).chmod(mode)
    warn_of_exposed_files(options)
    assert len(caplog.messages) == len(secret_files)
    for name, path, line in zip(KEYS, secret_files.values(), caplog.messages, strict=True):
        assert line.startswith(f"--{name.replace('_', '-')} {path}: others than its owner may read or write it")
        assert line.endswith(f"chmod 600 {path}")
    caplog.clear()
    router = RouterOptions(api_key_file=secret_files["api_key_file"])
    warn_of_exposed_files(router)
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("another_user")
@pytest.mark.parametrize("name", KEYS)
def test_a_key_or_secret_of_another_user_is_refused(secret_files: dict[str, Any], name: str) -> None:
    store = {"hicache_storage_backend": "redis", "enable_hierarchical_cache": True}
    store |= {} if name.endswith("url_file") else {"hicache_storage_url": "redis://127.0.0.1/0"}
    options = {name: secret_files[name]} | (store if name.startswith("hicache") else {})
    with pytest.raises(OptionError, match="belongs to user 1234, not to 4321 who runs this server"):
        check_options(ServerOptions(**options))


def test_a_key_through_a_pipe_is_read_for_any_owner(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("another_user")
    read, write = os.pipe()
    os.write(write, b"a-key")
    os.close(write)
    assert read_secret(f"/proc/self/fd/{read}") == b"a-key"
    os.close(read)


def test_a_client_reads_the_key_that_it_was_given(secret_files: dict[str, Any], request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("another_user")
    assert read_api_key(Path(secret_files["admin_key_file"])) == "the-admin"


def test_a_page_that_another_user_put_there_is_no_hit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = FileStore(tmp_path, PAGE, 1 << 20)
    page, into = bytearray(b"x" * PAGE), bytearray(PAGE)
    store.set([HASH], [memoryview(page)])
    assert store.get([HASH], [memoryview(into)]) == 1
    request.getfixturevalue("another_user")
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
    made = path.with_name("made.so")
    made.write_bytes(b"no library")
    publish_sealed(made, path)
    return path


def test_a_library_of_ours_is_used(planted: Path) -> None:
    assert build.build(build.LEVELS[-1]) == planted


@pytest.mark.parametrize("place", ["folder", "library"])
def test_a_library_that_others_may_have_written_is_never_loaded(planted: Path, place: str) -> None:
    target = planted if place == "library" else planted.parent
    target.chmod(0o777)
    with pytest.raises(build.BuildError, match=f"{target.name} is not used: others than its owner"):
        build.build(build.LEVELS[-1])


def test_the_library_of_another_user_is_never_loaded(planted: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("another_user")
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


@pytest.mark.parametrize("place", ["folder", "parent", "behind a link of ours"])
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "target" / "below").mkdir(parents=True, mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    asked = {"folder": link, "parent": link / "below", "behind a link of ours": tmp_path / "ours"}[place]
    if place == "behind a link of ours":
        asked.symlink_to(link)
    trusted_path.make_private_folder(asked)
    LogFolder(asked).open("a.log").close()
    if os.geteuid() == 0:
        os.lchown(link, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(PermissionError, match="is a link, and it belongs to user"):
        trusted_path.make_private_folder(asked)
    with pytest.raises(LogFolderError, match="is a link, and it belongs to user"):
        LogFolder(asked)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give links away")
def test_a_key_file_is_not_read_through_another_users_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("a key")
    link = tmp_path / "keys"
    link.symlink_to(tmp_path / "target")
    assert trusted_path.read_secret(link) == b"a key"
    os.lchown(link, 65534, 65534)
    with pytest.raises(PermissionError, match="is a link, and it belongs to user 65534"):
        trusted_path.read_secret(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give links away")
def test_another_users_link_in_shared_memory_is_not_followed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "target").write_text("a key")
    (tmp_path / "target").chmod(0o600)
    link = Path("/dev/shm") / f"pdserve-test-{os.getpid()}"
    link.symlink_to(tmp_path / "target")
    request.addfinalizer(link.unlink)
    os.lchown(link, 65534, 65534)
    for read in (trusted_path.read_secret, lambda path: trusted_path.read_regular(path, 99)):
        with pytest.raises(PermissionError, match="is a link, and it belongs to user 65534"):
            read(link)


def test_links_resolve_as_pathlib_does(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b/../b")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "up" / "missing" / "x", tmp_path / "up" / "..", tmp_path / "a" / ".." / "up"):
        assert trusted_path.without_links(path) == path.resolve()
    with pytest.raises(OSError, match="symbolic links"):
        trusted_path.without_links(tmp_path / "loop")
