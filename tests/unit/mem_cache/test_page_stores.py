"""Stores of KV pages: what was kept comes back or counts as not there, whatever happened to it meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from support.page_stores import PAGE, fetch, keep, page_file, page_hash, pages
from support.processes import free_ports
from support.redis_server import SERVER, redis_server

from pdserve.mem_cache.storage.base import StoreFull, StoreMisconfigured, StoreUnavailable
from pdserve.mem_cache.storage.breaker import FAILURES, MOST_SECONDS, Breaker, BreakerState
from pdserve.mem_cache.storage.file_store import FileStore
from pdserve.mem_cache.storage.frame import HEADER_BYTES
from pdserve.mem_cache.storage.registry import make_store


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
        where = page_file(tmp_path, 1)
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


def test_a_dead_redis_is_reported_without_its_password():
    [port] = free_ports(1)
    store = make_store("redis", f"redis://user:secret@127.0.0.1:{port}/0", PAGE, 0, 1.0)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as raised:
        keep(store, 1)
    assert "secret" not in str(raised.value)


def test_a_redis_that_hangs_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = make_store("redis", f"redis://127.0.0.1:{silent.getsockname()[1]}/0", PAGE, 0, 0.2)
        for ask in (lambda: fetch(store, 1), lambda: keep(store, 1), lambda: store.exists([page_hash(1)])):
            with pytest.raises(StoreUnavailable, match="Timeout"):
                ask()
        store.close()


def test_a_redis_that_is_full_is_reported(tmp_path):
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
