"""Numbered pages that tests keep in stores of KV pages."""

from __future__ import annotations

from pdserve.mem_cache.storage.frame import HEADER_BYTES

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


def page_file(folder, i: int, suffix: str = ".page"):
    return folder / page_hash(i).hex()[:2] / f"{page_hash(i).hex()}{suffix}"
