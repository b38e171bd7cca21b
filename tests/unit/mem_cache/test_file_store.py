"""The store in a folder: its limit, full and failing disks, and other processes that use it."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
from support.page_stores import FILE_BYTES, PAGE, fetch, keep, page, page_file, page_hash, pages

from pdserve.mem_cache.storage import file_store
from pdserve.mem_cache.storage.base import StoreFull, StoreMisconfigured, StoreUnavailable
from pdserve.mem_cache.storage.file_store import FileStore


def _ages(folder, **seconds: float) -> None:
    for name, age in seconds.items():
        at = time.time() - age
        os.utime(page_file(folder, int(name[1:])), (at, at))


def test_a_folder_keeps_to_its_limit_and_drops_the_longest_unused(tmp_path):
    store = FileStore(tmp_path, PAGE, 4 * FILE_BYTES)
    keep(store, 0, 1, 2, 3)
    _ages(tmp_path, _0=3000, _1=4000, _2=2000, _3=1000)
    assert fetch(store, 1) == pages(1)  # used just now
    keep(store, 4)
    assert [i for i in range(5) if page_file(tmp_path, i).exists()] == [1, 3, 4]
    assert store.usage() == (3, 3 * FILE_BYTES, 0, 2)


def test_what_is_kept_goes_last_until_its_time_is_over(tmp_path):
    store = FileStore(tmp_path, PAGE, 4 * FILE_BYTES)
    keep(store, 0, 1, 2, 3)
    _ages(tmp_path, _0=4000, _1=3000, _2=2000, _3=1000)
    later = time.time() + 1000
    assert store.keep([page_hash(i) for i in (0, 1, 9, 2)], later) == 2
    assert store.keep([page_hash(0)], later - 500) == 1  # another caller does not shorten it
    assert fetch(store, 0) == pages(0)
    keep(store, 4)
    assert [i for i in range(5) if page_file(tmp_path, i).exists()] == [0, 1, 4]
    assert page_file(tmp_path, 0).stat().st_mtime == pytest.approx(later)
    assert store.keep([page_hash(0)], 0) == 1
    assert page_file(tmp_path, 0).stat().st_mtime <= time.time()


def test_what_others_wrote_counts_when_a_folder_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "RECOUNT_SECONDS", 0.0)
    one, other = (FileStore(tmp_path, PAGE, 4 * FILE_BYTES) for _ in range(2))
    keep(one, 0, 1, 2)
    keep(other, 3, 4, 5, 6, 7)
    assert sum(page_file(tmp_path, i).exists() for i in range(8)) == 3
    keep(one, 8, 9, 10, 11, 12)
    assert sum(page_file(tmp_path, i).exists() for i in range(13)) == 3
    assert one.usage().pages == 3


def test_a_full_disk_is_reported_and_makes_room(tmp_path, monkeypatch):
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


def test_a_disk_that_fails_is_reported(tmp_path, monkeypatch):
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


def test_a_folder_that_all_users_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StoreMisconfigured, match="chmod"):
        FileStore(tmp_path, PAGE, 1 << 30)


def test_files_that_can_not_be_removed_are_reported(tmp_path, monkeypatch):
    """Files of another user lie in a folder that has outgrown its limit."""
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
