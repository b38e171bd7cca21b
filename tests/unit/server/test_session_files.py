"""Sessions as files: what was written comes back whole, and a file that was tampered with is never used."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time

import msgspec
import pytest
from support.sim import make_generate

from pdserve.mem_cache.storage.frame import HEADER_BYTES, header
from pdserve.messages.base import pack_i32
from pdserve.messages.moves import RunningRequest
from pdserve.messages.sessions import SessionState
from pdserve.server.http.session_store import session_files
from pdserve.server.http.session_store.session_files import SessionError, SessionFiles, SessionInfo, SessionLimits

STATE = SessionState(
    running=RunningRequest(make_generate("r", [1, 2, 3], max_new_tokens=9), pack_i32([4, 5]), 9, 0.0),
    fingerprint="f",
    kv_seed=bytes(16),
)


def info(name: str, owner: str = "", *, ttl: float = 100, kv_bytes: int = 0) -> SessionInfo:
    now = time.time()
    return SessionInfo(name, owner, now, now + ttl, "m", 3, 2, 0, kv_bytes)


def files(tmp_path, *, total: int = 1 << 20, quota: int = 1 << 20) -> SessionFiles:
    return SessionFiles(tmp_path / "sessions", SessionLimits(total, quota, 100.0))


def path_of(tmp_path, name: str, owner: str = "anybody"):
    return tmp_path / "sessions" / owner / f"{name}.session"


def refusal(call) -> SessionError:
    with pytest.raises(SessionError) as caught:
        call()
    return caught.value


def test_it_comes_back_also_to_another_instance_and_each_owner_has_its_own(tmp_path):
    mine, other = files(tmp_path), files(tmp_path)
    for owner in ("", "alice", "..", "anybody"):
        mine.save(info("a", owner), msgspec.structs.replace(STATE, fingerprint=f"f-{owner}"))
    for owner in ("", "alice", "..", "anybody"):
        assert other.load(owner, "a").state.fingerprint == f"f-{owner}"
        assert [(s.name, s.info.owner) for s in other.listed(owner)] == [("a", owner)]
    assert len(other.listed(None)) == 4
    assert {p.name for p in tmp_path.iterdir()} == {"sessions"}
    mine.save(info("a"), msgspec.structs.replace(STATE, fingerprint="newer"))
    assert other.load("", "a").state.fingerprint == "newer"
    assert other.remove("", "a").state.fingerprint == "newer"
    assert refusal(lambda: mine.load("", "a")).status == 404
    assert refusal(lambda: mine.remove("", "a")).status == 404
    assert other.load("alice", "a")
    assert oct(path_of(tmp_path, "a", "key-alice").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".a", "../a", "a/b", "/etc/passwd", "a\0b", "a\nb", "ä", "-x", "a" * 129, "%2e%2e", "a b", "a\\b"],
)
def test_names_lead_nowhere_else(tmp_path, name):
    store = files(tmp_path)
    for call in (
        lambda: store.save(info(name), STATE),
        lambda: store.load("", name),
        lambda: store.remove("", name),
    ):
        assert refusal(call).status == 400
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_every_cut_and_every_changed_byte_is_found(tmp_path):
    store = files(tmp_path)
    store.save(info("a"), STATE)
    path = path_of(tmp_path, "a")
    intact, wanted = path.read_bytes(), store.load("", "a")
    second = 4 + HEADER_BYTES + int.from_bytes(intact[:4], "little")
    unused = {frame + 6 + i for frame in (4, second) for i in (0, 1)}  # of a frame's head
    for i in range(len(intact)):
        path.write_bytes(intact[:i])
        assert refusal(lambda: store.load("", "a")).status == 409, i
        path.write_bytes(intact[:i] + bytes([intact[i] ^ 0x10]) + intact[i + 1 :])
        if i in unused:
            assert store.load("", "a") == wanted
            continue
        assert refusal(lambda: store.load("", "a")).status == 409, i
    path.write_bytes(intact + b"\0")
    said = refusal(lambda: store.load("", "a"))
    assert (said.status, "damaged and not used" in str(said)) == (409, True)
    assert [s.info is not None for s in store.listed("")] == [True]  # what a list shows is whole
    path.write_bytes(b"\xff" * 200)
    assert [s.info for s in store.listed("")] == [None]
    assert store.remove("", "a") is None
    assert not path.exists()


def test_a_session_under_another_name_or_owner_or_with_another_state_is_none(tmp_path):
    store = files(tmp_path)
    store.save(info("a", "alice"), STATE)
    store.save(info("b", "alice"), msgspec.structs.replace(STATE, fingerprint="other"))
    store.save(info("a", "bob"), STATE)
    ours, second = path_of(tmp_path, "a", "key-alice").read_bytes(), path_of(tmp_path, "b", "key-alice").read_bytes()
    path_of(tmp_path, "b", "key-alice").write_bytes(ours)
    path_of(tmp_path, "a", "key-bob").write_bytes(ours)
    assert refusal(lambda: store.load("alice", "b")).status == 409
    assert refusal(lambda: store.load("bob", "a")).status == 409
    head = 4 + HEADER_BYTES + int.from_bytes(ours[:4], "little")
    path_of(tmp_path, "a", "key-alice").write_bytes(ours[:head] + second[head:])
    assert refusal(lambda: store.load("alice", "a")).status == 409


@pytest.mark.parametrize(
    "junk", [b"", b"\x91" * 10_000, b"\xa2\xff\xff", b"\x80", msgspec.msgpack.encode({"running": 1})]
)
def test_content_that_no_session_has_is_refused_though_its_checksums_are_right(tmp_path, junk):
    """Such content comes from a later version, or from a user that can compute a checksum."""
    store = files(tmp_path)
    store.save(info("a"), STATE)
    path = path_of(tmp_path, "a")
    intact = path.read_bytes()
    first = intact[4 + HEADER_BYTES :][: int.from_bytes(intact[:4], "little")]
    digest = session_files._digest_of(first)
    path.write_bytes(intact[: 4 + HEADER_BYTES + len(first)] + header(digest, memoryview(junk)) + junk)
    assert refusal(lambda: store.load("", "a")).status == 409
    head = header(session_files._digest("", "a"), memoryview(junk))
    path.write_bytes(len(junk).to_bytes(4, "little") + head + junk)
    assert refusal(lambda: store.load("", "a")).status == 409
    assert [s.info for s in store.listed("")] == [None]


def test_links_pipes_and_folders_are_no_sessions_and_can_be_deleted(tmp_path):
    store = files(tmp_path)
    store.save(info("a"), STATE)
    secret = tmp_path / "secret"
    path_of(tmp_path, "a").rename(secret)
    path_of(tmp_path, "a").symlink_to(secret)
    os.mkfifo(path_of(tmp_path, "pipe"))
    path_of(tmp_path, "folder").mkdir()
    for name in ("a", "pipe", "folder"):
        assert refusal(lambda name=name: store.load("", name)).status == 409
    assert [(s.name, s.info) for s in store.listed("")] == [("a", None), ("folder", None), ("pipe", None)]
    store.save(info("a"), STATE)  # takes the link's place, and leaves alone what it led to
    assert not path_of(tmp_path, "a").is_symlink()
    said = refusal(lambda: store.save(info("folder"), STATE))
    assert (said.status, "a folder stands in its place" in str(said)) == (409, True)
    (path_of(tmp_path, "folder") / "somebody's").touch()
    said = refusal(lambda: store.remove("", "folder"))
    assert (said.status, "remove anybody/folder.session by hand" in str(said)) == (409, True)
    (path_of(tmp_path, "folder") / "somebody's").unlink()
    for name in ("pipe", "folder"):
        assert store.remove("", name) is None
    path_of(tmp_path, "b").symlink_to(secret)
    assert store.remove("", "b") is None
    assert [s.name for s in store.listed("")] == ["a"]
    assert secret.exists()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        SessionFiles(tmp_path / "open", SessionLimits(1, 1, 1.0))


def test_quotas_count_the_kv_and_not_what_is_replaced(tmp_path, monkeypatch):
    store = files(tmp_path, total=50_000, quota=30_000)
    store.save(info("a", "alice", kv_bytes=20_000), STATE)
    store.save(info("a", "alice", kv_bytes=25_000), STATE)
    said = refusal(lambda: store.save(info("b", "alice", kv_bytes=20_000), STATE))
    assert (said.status, "--kv-sessions-quota" in str(said)) == (507, True)
    store.save(info("a", "bob", kv_bytes=20_000), STATE)
    said = refusal(lambda: store.save(info("a", "carol", kv_bytes=20_000), STATE))
    assert (said.status, "--kv-sessions-size" in str(said)) == (507, True)
    monkeypatch.setattr(session_files, "MAX_SESSIONS", 1)
    assert "1 sessions" in str(refusal(lambda: store.save(info("c", "alice"), STATE)))
    assert [s.name for s in store.listed("alice")] == ["a"]


def test_a_session_is_gone_when_its_time_is_over(tmp_path):
    store = files(tmp_path, quota=2500)
    store.save(info("old", ttl=-1, kv_bytes=1000), STATE)
    assert refusal(lambda: store.load("", "old")).status == 404
    assert store.listed("") == []
    store.save(info("new", kv_bytes=1000), STATE)
    assert [p.name for p in (tmp_path / "sessions" / "anybody").iterdir()] == ["new.session"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    store = files(tmp_path)
    store.save(info("a"), STATE)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session_files.os, "fsync", full)
    assert refusal(lambda: store.save(info("a"), msgspec.structs.replace(STATE, fingerprint="new"))).status == 507
    assert store.load("", "a").state.fingerprint == "f"
    assert [p.name for p in (tmp_path / "sessions" / "anybody").iterdir()] == ["a.session"]


def test_what_a_killed_process_left_is_removed_in_time(tmp_path):
    store = files(tmp_path)
    store.save(info("a"), STATE)
    for name, age in (("unfinished-1", 4000), ("unfinished-2", 0)):
        path = tmp_path / "sessions" / "anybody" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    store.save(info("b"), STATE)
    assert {p.name for p in (tmp_path / "sessions" / "anybody").iterdir()} == {"a.session", "b.session", "unfinished-2"}


def test_another_instance_that_stopped_while_it_wrote_holds_up_no_other_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(session_files, "LOCK_SECONDS", 0.0)
    store = files(tmp_path)
    with (tmp_path / "sessions" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refusal(lambda: store.save(info("a"), STATE)).status == 503
    store.save(info("a"), STATE)


WRITER = """
import itertools, sys, time
from pathlib import Path
import msgspec
from pdserve.messages.sessions import SessionState
from pdserve.server.http.session_store.session_files import SessionFiles, SessionInfo, SessionLimits

files = SessionFiles(Path(sys.argv[1]), SessionLimits(1 << 40, 1 << 40, 100.0))
state = msgspec.msgpack.decode(Path(sys.argv[2]).read_bytes(), type=SessionState)
now = time.time()
for i in itertools.count():
    info = SessionInfo("a", "", now, now + 100, "m", i, 2, 0, 0)
    files.save(info, msgspec.structs.replace(state, fingerprint=f"f{i}"))
"""


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    """A writer that does nothing else, killed wherever it is; a reader finds a whole session at any moment."""
    running = msgspec.structs.replace(STATE.running, output=pack_i32(range(100_000)))
    (tmp_path / "state").write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(STATE, running=running)))
    store = files(tmp_path)
    for versions in (1, 4, 9):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "sessions"), str(tmp_path / "state")])
        try:
            seen: set[int] = set()
            while len(seen) < versions:
                found = store.find("", "a") if path_of(tmp_path, "a").exists() else None
                if found is None:
                    assert writer.poll() is None
                    continue
                assert found.state.fingerprint == f"f{found.info.prompt_tokens}"
                seen.add(found.info.prompt_tokens)
        finally:
            writer.kill()
            writer.wait()
        found = store.load("", "a")
        assert found.state.fingerprint == f"f{found.info.prompt_tokens}"
        assert found.state.running.output == running.output
    store.save(info("b"), STATE)  # the lock is free
