"""The header of a stored page, which proves that it is the right one and complete.

``magic, version, hash of the page's prefix, length, xxh3_64 of the bytes``. The checksum finds errors of disks and
networks. It is no signature: programs that may write to a store are trusted, as docs/security.md says, unless pages are
sealed with a key (``sealed_frame.py``).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

import xxhash

MAGIC = b"pdKV"
VERSION = 1
_HEADER = struct.Struct("<4sHxx16sQQ")
HEADER_BYTES = _HEADER.size
PLAIN_SUFFIX = ".page"
SEALED_SUFFIX = ".sealed"
SUFFIXES = (PLAIN_SUFFIX, SEALED_SUFFIX)
"""Ends of the names of all files with pages, whatever their framing."""


class BadFrame(ValueError):
    """The data that was read is not the page that was asked for. The message says in which respect."""


def header(page_hash: bytes, page: memoryview) -> bytes:
    """Return the header of ``page``, which precedes it in a store: magic, version, hash, length and checksum."""
    return _HEADER.pack(MAGIC, VERSION, page_hash, page.nbytes, xxhash.xxh3_64_intdigest(page))


def check(head: bytes | memoryview, page_hash: bytes, page: memoryview) -> None:
    """Raise ``BadFrame`` unless ``head`` is a valid header of the bytes ``page`` under the hash ``page_hash``."""
    if len(head) != HEADER_BYTES:
        raise BadFrame(f"{len(head)} bytes are less than a header of {HEADER_BYTES}")
    magic, version, named, nbytes, checksum = _HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"not a page of version {VERSION} of this format")
    if named != page_hash:
        raise BadFrame("another page's bytes stand under its name")
    if nbytes != page.nbytes:
        raise BadFrame(f"a page of {nbytes} bytes in the place of one of {page.nbytes}")
    if xxhash.xxh3_64_intdigest(page) != checksum:
        raise BadFrame("its bytes are not those that were written")


class Framing(ABC):
    """How pages are framed in a store."""

    version: int
    header_bytes: int
    suffix: str
    """Ends the names of files with such pages, so that stores with different framings can share a folder."""

    @abstractmethod
    def header(self, page_hash: bytes, page: memoryview) -> bytes:
        """Return the header of ``page``, which precedes it in a store."""

    @abstractmethod
    def check(self, head: bytes | memoryview, page_hash: bytes, page: memoryview) -> None:
        """Raise ``BadFrame`` unless ``head`` is a valid header of the bytes ``page`` under the hash ``page_hash``."""


class Checksummed(Framing):
    """Framing with a checksum, as this module describes it."""

    version = VERSION
    header_bytes = HEADER_BYTES
    suffix = PLAIN_SUFFIX

    def header(self, page_hash: bytes, page: memoryview) -> bytes:
        return header(page_hash, page)

    def check(self, head: bytes | memoryview, page_hash: bytes, page: memoryview) -> None:
        check(head, page_hash, page)
