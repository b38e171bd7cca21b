"""Stores of KV pages: what was kept comes back or counts as not there, whatever happened to it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time

import pytest
from support.processes import free_ports
from support.redis_server import SERVER, redis_server

from pdserve.mem_cache.storage import file_store
from pdserve.mem_cache.storage.base import StoreFull, StoreMisconfigured, StoreUnavailable
from pdserve.mem_cache.storage.breaker import FAILURES, MOST_SECONDS, Breaker, BreakerState
from pdserve.mem_cache.storage.file_store import FileStore
from pdserve.mem_cache.storage.frame import HEADER_BYTES, header
from pdserve.mem_cache.storage.registry import make_store
from pdserve.mem_cache.storage.sealed_frame import Sealed
from pdserve.runtime.cluster_secret import KeyRing
from pdserve.runtime.option_checks import OptionError, check_options
from pdserve.runtime.options import ServerOptions

PAGE = 5_000
FILE_BYTES = HEADER_BYTES + PAGE


def page_hash(i: int) -> bytes:
    return i.to_bytes(16, "big")


def page(i: int) -> memoryview:
    return memoryview(bytes([i % 251]) * PAGE)


def keep(store, *numbers: int) -> None:
    store.set([page_hash(i) for i in numbers], [page(i) for i in numbers])


def fetch(store, *numbers: int) -> list[bytes]:
    into = [memoryview(bytearray(PAGE)) for _ in numbers]
    count = store.get([page_hash(i) for i in numbers], into)
    return [bytes(view) for view in into[:count]]


def pages(*numbers: int) -> list[bytes]:
    return [bytes(page(i)) for i in numbers]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if SERVER is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(params=["file", "redis"])
def store(request, tmp_path):
    url = str(tmp_path / "kv") if request.param == "file" else request.getfixturevalue("redis_url")
    store = make_store(request.param, url, PAGE, 1 << 30, 5.0)
    yield store
    if request.param == "redis":
        store._client.flushdb()
    store.close()


def test_pages_come_back_as_far_as_they_are_there(store):
    keep(store, 1, 2, 4)
    keep(store, 2)
    assert store.exists([page_hash(i) for i in (1, 2, 3, 4)]) == 2
    assert fetch(store, 1, 2, 3, 4) == pages(1, 2)
    assert fetch(store, 4) == pages(4)
    assert fetch(store, 3) == []
    assert store.exists([]) == 0
    assert fetch(store) == []


def test_another_instance_finds_them(tmp_path):
    keep(FileStore(tmp_path, PAGE, 1 << 30), 7)
    assert fetch(FileStore(tmp_path, PAGE, 1 << 30), 7) == pages(7)


def _file(folder, i: int, suffix: str = ".page"):
    return folder / page_hash(i).hex()[:2] / f"{page_hash(i).hex()}{suffix}"


def _damages():
    return {
        "one bit": lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:],
        "its end": lambda raw: raw[:-1],
        "its end, and its header": lambda raw: raw[: HEADER_BYTES - 1],
        "everything": lambda raw: b"",
        "a byte too many": lambda raw: raw + b"\0",
        "another page": lambda raw: raw.replace(page_hash(1), page_hash(2)),
        "another length": lambda raw: raw[:24] + (PAGE - 1).to_bytes(8, "little") + raw[32:],
        "a later version": lambda raw: raw[:4] + b"\2" + raw[5:],
        "no page at all": lambda raw: bytes(len(raw)),
    }


@pytest.mark.parametrize("damage", _damages())
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_what_is_not_right_is_not_there_and_makes_way(request, tmp_path, kind, damage):
    url = str(tmp_path) if kind == "file" else request.getfixturevalue("redis_url")
    store = make_store(kind, url, PAGE, 1 << 30, 5.0)
    keep(store, 0, 1)
    if kind == "file":
        where = _file(tmp_path, 1)
        where.write_bytes(_damages()[damage](where.read_bytes()))
    else:
        key = b"pdserve:kv:1:" + page_hash(1)
        store._client.set(key, _damages()[damage](store._client.get(key)))
    assert fetch(store, 0, 1) == pages(0)
    assert store.usage().bad_pages == 1
    assert store.exists([page_hash(1)]) == 0
    keep(store, 1)
    assert fetch(store, 0, 1) == pages(0, 1)
    store.close()


@pytest.fixture(params=["file", "redis"])
def sealed(request, tmp_path):
    """Makes stores at one place, with these secrets; and reads and writes what lies there for page 1."""
    url = str(tmp_path / "kv") if request.param == "file" else request.getfixturevalue("redis_url")
    with contextlib.ExitStack() as stack:

        def make(*secrets: bytes):
            ring = KeyRing(secrets) if secrets else None
            store = make_store(request.param, url, PAGE, 1 << 30, 5.0, ring)
            stack.callback(store.close)
            return store

        def raw(store, i: int, change=None) -> bytes:
            where = _file(tmp_path / "kv", i, store.framing.suffix)
            key = b"pdserve:kv:%d:" % store.framing.version + page_hash(i)
            now = where.read_bytes() if request.param == "file" else store._client.get(key)
            if change is not None:
                where.write_bytes(change(now)) if request.param == "file" else store._client.set(key, change(now))
            return now

        if request.param == "redis":  # other tests leave pages there
            make()._client.flushdb()
        yield make, raw


OURS, NEXT, THEIRS = b"o" * 32, b"n" * 32, b"t" * 32


def test_sealed_pages_are_there_for_who_has_the_key(sealed):
    make, _ = sealed
    keep(make(OURS), 0, 1)
    assert fetch(make(OURS), 0, 1) == pages(0, 1)
    changing = make(NEXT, OURS)
    assert fetch(changing, 0, 1) == pages(0, 1)
    keep(changing, 2)
    assert fetch(make(NEXT), 2) == pages(2)
    assert fetch(make(THEIRS), 0) == []
    keep(make(OURS), 0)
    assert fetch(make(), 0) == []


@pytest.mark.parametrize("writer", [(), (THEIRS,)], ids=["no key", "another key"])
def test_what_somebody_without_the_key_put_there_counts_as_not_there(sealed, writer):
    make, raw = sealed
    planted, store = make(*writer), make(OURS)
    keep(planted, 1)
    theirs = raw(planted, 1)
    assert fetch(store, 1) == []
    keep(store, 0, 1)
    assert fetch(store, 0, 1) == pages(0, 1)
    raw(store, 1, lambda _: theirs)
    assert fetch(store, 0, 1) == pages(0)
    assert store.usage().bad_pages >= 1
    keep(store, 1)
    assert fetch(store, 0, 1) == pages(0, 1)


def test_stores_with_and_without_a_key_leave_each_others_pages_alone(sealed):
    make, _ = sealed
    plain, with_key = make(), make(OURS)
    keep(plain, 0, 1)
    keep(with_key, 1, 2)
    for _ in range(2):
        assert (fetch(plain, 0, 1), fetch(plain, 2)) == (pages(0, 1), [])
        assert (fetch(with_key, 1, 2), fetch(with_key, 0)) == (pages(1, 2), [])
    assert plain.usage().bad_pages == with_key.usage().bad_pages == 0
    plain.remove([page_hash(1)])
    assert (plain.exists([page_hash(1)]), fetch(with_key, 1, 2)) == (0, pages(1, 2))


@pytest.mark.parametrize("rings", [(None, KeyRing([OURS])), (KeyRing([OURS]), None)], ids=["a key was set", "dropped"])
def test_pages_of_the_other_kind_count_and_go_when_they_are_the_longest_unused(tmp_path, rings):
    then, now = (make_store("file", str(tmp_path), PAGE, 20 * FILE_BYTES, 5.0, ring) for ring in rings)
    keep(then, *range(12))
    for i in range(11):
        path = _file(tmp_path, i, then.framing.suffix)
        os.utime(path, (time.time() - 1000 - i,) * 2)
    now.close()
    now = make_store("file", str(tmp_path), PAGE, 20 * FILE_BYTES, 5.0, rings[1])
    assert now.usage().pages == 12
    keep(now, *range(100, 112))
    assert now.usage().evicted_pages > 0
    assert sum(f.stat().st_size for f in tmp_path.glob("*/*")) == now.usage().nbytes <= 20 * FILE_BYTES
    assert fetch(now, *range(100, 112)) == pages(*range(100, 112))
    assert fetch(then, 11) == pages(11), "it was used last"
    assert fetch(then, 10) == [], "it was the longest unused"
    for store in (then, now):
        store.close()


def _forgeries():
    begin = Sealed.header_bytes
    return {
        "one bit of the page": lambda raw, other: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:],
        "one bit of the tag": lambda raw, other: raw[: begin - 1] + bytes([raw[begin - 1] ^ 1]) + raw[begin:],
        "one bit of the nonce": lambda raw, other: raw[:32] + bytes([raw[32] ^ 1]) + raw[33:],
        "another page": lambda raw, other: other,
        "another page under this one's name": lambda raw, other: other.replace(page_hash(2), page_hash(1)),
        "another page with this one's tag": lambda raw, other: raw[:begin] + other[begin:],
        "its end": lambda raw, other: raw[:-1],
        "its end, and its header": lambda raw, other: raw[: begin - 1],
        "a version without a tag": lambda raw, other: raw[:4] + b"\1" + raw[5:],
        "a checksum": lambda raw, other: header(page_hash(1), page(1)) + bytes(page(1)),
    }


@pytest.mark.parametrize("forgery", _forgeries())
def test_a_sealed_page_that_was_changed_counts_as_not_there(sealed, forgery):
    make, raw = sealed
    store = make(OURS)
    keep(store, 0, 1, 2)
    other = raw(store, 2)
    raw(store, 1, lambda now: _forgeries()[forgery](now, other))
    assert fetch(store, 0, 1) == pages(0)
    assert (store.usage().bad_pages, store.exists([page_hash(1)])) == (1, 0)


def test_a_key_file_is_checked_before_anything_starts(tmp_path):
    path = tmp_path / "key"
    tiers = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "hicache_storage_url": str(tmp_path)}
    for content, told in (("short", "32 characters"), ("", "has 0 secrets"), (None, "No such file")):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(OptionError, match=f"--hicache-storage-key-file .*{told}"):
            check_options(ServerOptions(**tiers, hicache_storage_key_file=str(path)))
    path.write_bytes(OURS)
    check_options(ServerOptions(**tiers, hicache_storage_key_file=str(path)))
    with pytest.raises(OptionError, match="--hicache-storage-backend"):
        check_options(ServerOptions(hicache_storage_key_file=str(path)))


def _ages(folder, **seconds: float) -> None:
    for name, age in seconds.items():
        at = time.time() - age
        os.utime(_file(folder, int(name[1:])), (at, at))


def test_a_folder_keeps_to_its_limit_and_drops_the_longest_unused(tmp_path):
    store = FileStore(tmp_path, PAGE, 4 * FILE_BYTES)
    keep(store, 0, 1, 2, 3)
    _ages(tmp_path, _0=3000, _1=4000, _2=2000, _3=1000)
    assert fetch(store, 1) == pages(1)  # used just now
    keep(store, 4)
    assert [i for i in range(5) if _file(tmp_path, i).exists()] == [1, 3, 4]
    assert store.usage() == (3, 3 * FILE_BYTES, 0, 2)


def test_what_is_kept_for_somebody_goes_last_until_its_time_is_over(tmp_path):
    store = FileStore(tmp_path, PAGE, 4 * FILE_BYTES)
    keep(store, 0, 1, 2, 3)
    _ages(tmp_path, _0=4000, _1=3000, _2=2000, _3=1000)
    later = time.time() + 1000
    assert store.keep([page_hash(i) for i in (0, 1, 9, 2)], later) == 2
    assert store.keep([page_hash(0)], later - 500) == 1  # another's wish makes it no shorter
    assert fetch(store, 0) == pages(0)
    keep(store, 4)
    assert [i for i in range(5) if _file(tmp_path, i).exists()] == [0, 1, 4]
    assert _file(tmp_path, 0).stat().st_mtime == pytest.approx(later)
    assert store.keep([page_hash(0)], 0) == 1
    assert _file(tmp_path, 0).stat().st_mtime <= time.time()


def test_what_others_wrote_counts_when_a_folder_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "RECOUNT_SECONDS", 0.0)
    one, other = (FileStore(tmp_path, PAGE, 4 * FILE_BYTES) for _ in range(2))
    keep(one, 0, 1, 2)
    keep(other, 3, 4, 5, 6, 7)
    assert sum(_file(tmp_path, i).exists() for i in range(8)) == 3
    keep(one, 8, 9, 10, 11, 12)
    assert sum(_file(tmp_path, i).exists() for i in range(13)) == 3
    assert one.usage().pages == 3


def test_a_full_disk_is_said_and_makes_room(tmp_path, monkeypatch):
    store = FileStore(tmp_path, PAGE, 1 << 30)
    keep(store, 0, 1, 2, 3)

    def full(fd, buffers):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(StoreFull, match="hicache-storage-size"):
            keep(store, 4)
    assert store.usage().pages == 2
    assert not list(tmp_path.glob("unfinished-*"))
    keep(store, 4)
    assert fetch(store, 4) == pages(4)


def test_a_disk_that_fails_is_said(tmp_path, monkeypatch):
    store = FileStore(tmp_path, PAGE, 1 << 30)
    keep(store, 0)

    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreUnavailable, match=str(tmp_path)):
        fetch(store, 0)


def test_unfinished_files_of_killed_processes_go(tmp_path):
    old, young = tmp_path / "unfinished-1-0", tmp_path / "unfinished-2-0"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (0, 0))
    FileStore(tmp_path, PAGE, 1 << 30)
    assert (old.exists(), young.exists()) == (False, True)


def test_readers_find_whole_pages_while_others_write_and_evict(tmp_path):
    wrong = []

    def work(seed: int) -> None:
        store = FileStore(tmp_path, PAGE, 8 * FILE_BYTES)
        for i in range(200):
            number = (i * 7 + seed) % 16
            keep(store, number)
            wrong.extend(found for found in fetch(store, number) if found != bytes(page(number)))
        wrong.extend([b"bad"] * store.usage().bad_pages)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("name", "url", "words"),
    [
        ("file", None, "--hicache-storage-url"),
        ("file", "/dev/null/kv", "Not a directory"),
        ("redis", None, "redis://127.0.0.1"),
        ("redis", "http://127.0.0.1", "--hicache-storage-url"),
    ],
)
def test_what_cant_be_used_is_refused_by_name(name, url, words):
    with pytest.raises(StoreMisconfigured, match=words):
        make_store(name, url, PAGE, 1 << 30, 1.0)


def test_a_folder_that_anybody_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StoreMisconfigured, match="chmod"):
        FileStore(tmp_path, PAGE, 1 << 30)


def test_a_dead_redis_is_said_without_its_password():
    [port] = free_ports(1)
    store = make_store("redis", f"redis://user:secret@127.0.0.1:{port}/0", PAGE, 0, 1.0)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as told:
        keep(store, 1)
    assert "secret" not in str(told.value)


def test_a_redis_that_hangs_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = make_store("redis", f"redis://127.0.0.1:{silent.getsockname()[1]}/0", PAGE, 0, 0.2)
        for ask in (lambda: fetch(store, 1), lambda: keep(store, 1), lambda: store.exists([page_hash(1)])):
            with pytest.raises(StoreUnavailable, match="Timeout"):
                ask()
        store.close()


def test_a_redis_that_is_full_is_said(tmp_path):
    if SERVER is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as url:
        store = make_store("redis", url, PAGE, 0, 5.0)
        most = 4 << 20
        with pytest.raises(StoreFull, match="allkeys-lru"):
            keep(store, *range(most // PAGE))
        assert fetch(store, 0) == pages(0)
        store.close()


def test_the_breaker_opens_after_failures_in_a_row_for_longer_each_time():
    breaker = Breaker()
    for now in range(FAILURES - 1):
        breaker.failed("slow", now)
    breaker.succeeded()
    for now in range(FAILURES):
        assert breaker.state(now) is BreakerState.CLOSED
        breaker.failed("dead", now)
    now, seconds = FAILURES - 1.0, 1.0
    for _ in range(10):
        assert breaker.state(now + seconds - 0.01) is BreakerState.OPEN
        now += seconds
        assert breaker.state(now) is BreakerState.HALF_OPEN
        breaker.failed("still", now)
        seconds = min(2 * seconds, MOST_SECONDS)
    assert (breaker.trips, breaker.reason) == (11, "still")
    now += seconds
    breaker.succeeded()
    assert breaker.state(now) is BreakerState.CLOSED
    for _ in range(FAILURES):
        breaker.failed("again", now)
    assert breaker.state(now + 0.9) is BreakerState.OPEN
    assert breaker.state(now + 1.0) is BreakerState.HALF_OPEN


class Liar:
    """A server that lets clients in, and says ``reply`` to all that they ask."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(1 << 16):
                    # How a connection begins, several commands at a time: their names are the first words.
                    greetings = data.count(b"HELLO") * b"%1\r\n+proto\r\n:3\r\n" + data.count(b"SETINFO") * b"+OK\r\n"
                    sock.sendall(greetings or self._reply)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        *(
            b":abc\r\n",
            b"$abc\r\n",
            b":1\r\n",
            b"+OK\r\n",
            b"_\r\n",
            b"#t\r\n",
            b"\r\n",
            b"garbage\r\n",
            b"\xff\xff\r\n",
        ),
        *(b"*0\r\n", b"*-1\r\n", b"*1\r\n$1\r\nx\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n", b"*3\r\n$-1\r\n*0\r\n+x\r\n"),
        *(b"*4\r\n_\r\n_\r\n_\r\n_\r\n", b"%1\r\n+a\r\n+b\r\n", b"$3\r\nabcde\r\n", b"-ERR no\r\n", b"*1\r\n:x\r\n"),
    ],
)
def test_a_redis_that_makes_no_sense_is_a_store_that_fails(reply):
    liar = Liar(reply)
    store = make_store("redis", liar.url, PAGE, 0, 0.2)
    asks = {
        "get": lambda: fetch(store, 1, 2, 3),
        "set": lambda: keep(store, 1, 2, 3),
        "exists": lambda: store.exists([page_hash(i) for i in range(3)]),
        "remove": lambda: store.remove([page_hash(1)]),
        "probe": store.probe,
    }
    for name, ask in asks.items():
        try:
            said = ask()
        except (StoreUnavailable, StoreFull):
            continue  # whatever else is raised ends the store's thread
        assert name != "get" or said == []
        assert name != "exists" or 0 <= said <= 3
    store.close()
    liar.close()


def test_files_that_can_not_be_removed_are_said(tmp_path, monkeypatch):
    """Those of another user, in a folder that has outgrown its limit."""
    store = FileStore(tmp_path, PAGE, 2 * FILE_BYTES)
    keep(store, 0, 1)

    def refused(path):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(StoreUnavailable, match="not permitted"):
            keep(store, 2, 3, 4)
        patch.setattr(os, "writev", lambda fd, buffers: _full())
        with pytest.raises(StoreUnavailable, match="not permitted"):
            keep(store, 5)
    assert fetch(store, 2) == pages(2)


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
