"""Hashes of the contents of KV pages, to find where KV goes wrong (``--kv-debug``).

The messages share one ordered channel with the steps. So a hash covers what the earlier steps have written.

A hash covers the keys, or the values, of one layer of a page. They are hashed in the order "tokens", whatever the
pool's own order is. So instances with different engines report equal hashes for equal KV.
"""

from __future__ import annotations

import msgspec

from .base import Message
from .question import Answer, Question

HASH_BYTES = 8
"""Length of a hash: xxh3_64, little-endian. 0 stands for a page that does not exist."""


class HashPages(Message):
    """Scheduler → worker: hash the contents of these pages. Answered by ``PagesHashed``."""

    id: int
    pages: list[bytes]
    """Page numbers (int32) for each group of the layout, equally many of each. Those at one index hold the same tokens;
    0: the group has no page for them.
    """


class PagesHashed(Message):
    """Worker → scheduler: the hashes that ``HashPages`` asked for."""

    id: int
    hashes: list[bytes]
    """Hashes for each group: page by page, layer by layer, part by part (``KVGroup.parts``)."""
    order: str = "tokens"
    """Order in which the parts were read. It differs from "tokens" if the pool's layout cannot be converted. Then other
    instances may report different hashes for equal KV.
    """


class KVHashes(Answer):
    """Scheduler → HTTP: what the prefix cache holds of the tokens of a ``KVHashesReq``."""

    cached_tokens: int
    """Tokens of whole pages that are cached."""
    page_size: int
    extra_key: str
    """Namespace in which they were found."""
    order: str
    groups: list[HashedGroup]


class KVHashesReq(Question[KVHashes]):
    """HTTP → scheduler: return hashes of what the prefix cache holds of these tokens. Answered by ``KVHashes``."""

    input_ids: bytes
    """Token ids (int32)."""
    extra_key: str | None = None
    """Namespace to look in. None: the one that holds most of the tokens."""


class HashedGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Hashes of one group of layers, as in ``PagesHashed``."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    hashes: bytes
