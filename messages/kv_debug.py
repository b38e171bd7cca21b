"""Hashes of what lies in KV pages, for who looks for where KV goes wrong (``--kv-debug``).

They travel in one order with the steps, so that a hash is of what the steps before it have written. What is hashed is a
page's keys, and its values, of one layer, in the order "tokens" whatever the pool's own is: instances of unlike engines
say the same of the same KV.
"""

from __future__ import annotations

import msgspec

from .base import Message

HASH_BYTES = 8
"""xxh3_64, little-endian; 0 stands for a page that is not there."""


class HashPages(Message):
    """Scheduler → worker: what do these pages hold? ``pages`` (int32): of each group of the layout equally many, which
    belong together; 0 where a group has none. Answered by ``PagesHashed``.
    """

    id: int
    pages: list[bytes]


class PagesHashed(Message):
    """Worker → scheduler: the hashes of ``HashPages``, of each group: page by page, layer by layer, part by part
    (``KVGroup.parts``). ``order``: in which the parts were read; another than "tokens" where the pool's layout can't be
    converted, so that other instances may say something else of the same KV.
    """

    id: int
    hashes: list[bytes]
    order: str = "tokens"


class KVHashesReq(Message):
    """HTTP → scheduler: what does the prefix cache hold of these tokens (int32)? ``extra_key``: in which namespace;
    None: in that which holds most of them.
    """

    id: int
    input_ids: bytes
    extra_key: str | None = None


class HashedGroup(msgspec.Struct, forbid_unknown_fields=True):
    """``hashes`` of one group of layers, as in ``PagesHashed``."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    hashes: bytes


class KVHashes(Message):
    """What is cached of them: ``cached_tokens``, whole pages, in the namespace ``extra_key``. ``status`` above 200: why
    nothing is said.
    """

    id: int
    status: int = 200
    message: str = ""
    cached_tokens: int = 0
    page_size: int = 0
    extra_key: str = ""
    order: str = ""
    groups: list[HashedGroup] = []
