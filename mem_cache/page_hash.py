"""Hashes that identify KV pages in every process and on every host.

``hash(i) = blake2b(hash(i - 1) + tokens of page i)``, so a page's hash covers its whole prefix. The hash before the
first page covers everything else that the KV depends on: the model's fingerprint, the layout, and the namespace. Equal
hashes mean equal prefixes.

The hash has to withstand attacks, because clients choose the prompts. A client that made two prompts collide would get
an answer to another client's prompt. Clients choose namespaces as well. So models, namespaces and pages are hashed in
separate domains (BLAKE2's ``person``), and no namespace has the hash of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from ..messages.base import I32
from ..messages.worker import KVLayout

HASH_BYTES = 16
TOKEN_BYTES = 4
MODEL, NAMESPACE, PAGE = b"pdserve-model", b"pdserve-names", b"pdserve-page"
"""Domains of hashes, at most 16 bytes each. They must change whenever the input of a hash changes: a page stored under
an old hash must not be found by a new one.
"""


def _digest(content: bytes, domain: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES, person=domain).digest()


def model_seed(fingerprint: str, layout: KVLayout) -> bytes:
    """Return the hash before the first page of a model's prompts that have no namespace.

    It covers the model's fingerprint and its KV layout.
    ``namespace_seed`` makes the hash for a namespace from it.
    """
    return _digest(fingerprint.encode() + msgspec.json.encode(layout), MODEL)


def namespace_seed(seed: bytes, namespace: bytes) -> bytes:
    """Return the hash before the first page of prompts in ``namespace`` (a request's ``extra_key``, as bytes)."""
    return _digest(seed + namespace, NAMESPACE) if namespace else seed


def chain(before: bytes, key: bytes, page_size: int) -> list[bytes]:
    """Return the hashes of the pages of ``key`` (whole pages of int32 tokens, as bytes), chained to ``before``."""
    step = page_size * TOKEN_BYTES
    hashes = []
    for at in range(0, len(key), step):
        before = blake2b(before + key[at : at + step], digest_size=HASH_BYTES, person=PAGE).digest()
        hashes.append(before)
    return hashes


def prompt_hashes(seed: bytes, tokens: I32, page_size: int, extra_key: str) -> list[bytes]:
    """Return the hashes of the whole pages of a prompt's ``tokens`` in the namespace ``extra_key``."""
    return further_hashes(seed, tokens, page_size, extra_key, [])


def further_hashes(seed: bytes, tokens: I32, page_size: int, extra_key: str, known: Sequence[bytes]) -> list[bytes]:
    """Return the hashes of a prompt's whole pages after those that are ``known``: the hashes of its first pages, in
    order.
    """
    first, whole = len(known) * page_size, len(tokens) // page_size * page_size
    before = known[-1] if known else namespace_seed(seed, extra_key.encode(errors="surrogatepass"))
    return chain(before, tokens[first:whole].tobytes(), page_size)
