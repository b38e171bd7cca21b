"""Sealed pages: only a store with the key reads them, and a changed page counts as not there."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from support.page_stores import FILE_BYTES, PAGE, fetch, keep, page, page_file, page_hash, pages
from support.redis_server import SERVER, redis_server

from pdserve.mem_cache.storage.frame import header
from pdserve.mem_cache.storage.registry import make_store
from pdserve.mem_cache.storage.sealed_frame import Sealed
from pdserve.runtime.cluster_secret import KeyRing
from pdserve.runtime.options import OptionError, check_options
from pdserve.server.options import ServerOptions


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if SERVER is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


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
            where = page_file(tmp_path / "kv", i, store.framing.suffix)
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
def test_a_page_that_was_written_without_the_key_counts_as_not_there(sealed, writer):
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
        path = page_file(tmp_path, i, then.framing.suffix)
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
    for content, reason in (("short", "32 characters"), ("", "has 0 secrets"), (None, "No such file")):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(OptionError, match=f"--hicache-storage-key-file .*{reason}"):
            check_options(ServerOptions(**tiers, hicache_storage_key_file=str(path)))
    path.write_bytes(OURS)
    check_options(ServerOptions(**tiers, hicache_storage_key_file=str(path)))
    with pytest.raises(OptionError, match="--hicache-storage-backend"):
        check_options(ServerOptions(hicache_storage_key_file=str(path)))
