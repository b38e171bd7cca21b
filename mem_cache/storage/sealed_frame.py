"""Frames of stored pages that only the holders of a key can have written.

``magic, version, hash of the page's prefix, length, nonce, tag``. The tag is GMAC (AES-256-GCM with nothing encrypted)
of the page's bytes, under a key made for this page's hash. So no page passes for another. Nonces are random. Only if
two writes of one page draw the same 96 bits, their tags reveal something about the key.

GMAC is some 15 times as fast as HMAC or BLAKE2 of the standard library on processors with AES instructions. That
matters, because a request waits for its pages from a store (docs/tiers.md has figures).
"""

from __future__ import annotations

import hmac
import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...runtime.cluster_secret import KeyRing
from .frame import MAGIC, SEALED_SUFFIX, BadFrame, Framing

NONCE_BYTES = 12
TAG_BYTES = 16
_HEADER = struct.Struct(f"<4sHxx16sQ{NONCE_BYTES}s{TAG_BYTES}s")


class Sealed(Framing):
    """Framing with a tag; see the module. Pages are sealed with the ring's first key, and read with any of them."""

    version = 2
    header_bytes = _HEADER.size
    suffix = SEALED_SUFFIX

    def __init__(self, ring: KeyRing) -> None:
        self._keys = ring.keys("stored pages")

    def header(self, page_hash: bytes, page: memoryview) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        tag = _cipher(self._keys[0], page_hash).encrypt(nonce, b"", page)
        return _HEADER.pack(MAGIC, self.version, page_hash, page.nbytes, nonce, tag)

    def check(self, head: bytes | memoryview, page_hash: bytes, page: memoryview) -> None:
        if len(head) != _HEADER.size:
            raise BadFrame(f"{len(head)} bytes are less than a header of {_HEADER.size}")
        magic, version, named, nbytes, nonce, tag = _HEADER.unpack(head)
        if magic != MAGIC or version != self.version:
            raise BadFrame(f"not a page of version {self.version} of this format, which is sealed with a key")
        if named != page_hash or nbytes != page.nbytes:
            raise BadFrame("another page's bytes stand under its name")
        if not any(_opens(key, page_hash, nonce, tag, page) for key in self._keys):
            raise BadFrame("it was not sealed with the key of this store")


def _cipher(key: bytes, page_hash: bytes) -> AESGCM:
    return AESGCM(hmac.digest(key, page_hash, "sha256"))


def _opens(key: bytes, page_hash: bytes, nonce: bytes, tag: bytes, page: memoryview) -> bool:
    try:
        _cipher(key, page_hash).decrypt(nonce, tag, page)
    except InvalidTag:
        return False
    return True
