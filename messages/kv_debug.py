"""Hashes of what lies in KV pages, for who looks for where KV goes wrong (``--kv-debug``).

They travel in one order with the steps, so that a hash is of what the steps before it have written. What is hashed is a
page's keys, and its values, of one layer, in the order "tokens" whatever the pool's own is: instances of unlike engines
say the same of the same KV.
"""

from __future__ import annotations

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
    (``KVGroup.parts``).
    """

    id: int
    hashes: list[bytes]
