"""``POST /kv/hashes``: what the KV pool holds of a prompt, as hashes, so that an engineer can compare two instances.

The checks of ``--kv-debug`` themselves are in ``scheduler/kv_debug.py``: KV memory and hand-overs ask for them.
"""

from __future__ import annotations

from typing import Any

from ...messages.base import unpack_i32
from ...messages.kv_debug import HashedGroup, KVHashes, KVHashesReq, PagesHashed
from ...messages.metrics import Family
from ...messages.question import RefusedAnswer
from ...messages.worker import KVLayout
from ..feature import Feature
from ..handlers import answers, receives
from ..kv_memory import KVMemory
from ..outbox import Outbox

NO_DEBUG = "this instance takes no hashes of its KV; start it with --kv-debug"


class KVHashing(Feature):
    """The hash checks of ``--kv-debug``, as a part of the loop."""

    def __init__(self, memory: KVMemory, layout: KVLayout, outbox: Outbox) -> None:
        self._debug = memory.debug
        self._memory = memory
        self._layout = layout
        self._outbox = outbox

    @answers(KVHashesReq)
    def ask(self, question: KVHashesReq, now: float) -> KVHashes | RefusedAnswer | None:
        """Begin to hash the cached pages of a prompt, and return None: the answer is sent when the hashes are there.

        If the question names no namespace (``extra_key``), the one with the most of the prompt cached is taken. The
        pages count as used. Steps wait only for the hashing itself. Refuse with 501 without ``--kv-debug``.
        """
        if not self._debug.enabled:
            return RefusedAnswer(501, NO_DEBUG)
        memory = self._memory
        size, tokens = memory.pool.page_size, unpack_i32(question.input_ids)
        # The tokens may be anything, and no more than the pool holds are cached: the rest must not hold up the loop.
        tokens = tokens[: min(len(tokens), memory.pool.max_total_tokens) // size * size]
        namespaces = ["", *self._debug.namespaces] if question.extra_key is None else [question.extra_key]
        namespaces = [name for name in namespaces if memory.pool.cached_len(tokens[:size], name)] or namespaces[:1]
        key = max(namespaces, key=lambda namespace: memory.pool.cached_len(tokens, namespace))
        pages = memory.pages_with_kv(None, tokens, key)

        def tell(event: PagesHashed) -> None:
            groups = [
                HashedGroup(group.layers, group.parts, hashes)
                for group, hashes in zip(self._layout.groups, event.hashes, strict=True)
            ]
            self._outbox.reply(question, KVHashes(len(pages) * size, size, key, event.order, groups))

        self._debug.glance(pages, tell)
        return None

    @receives(PagesHashed)
    def on_hashed(self, event: PagesHashed, now: float) -> None:
        """Pass hashes that the worker has computed on to the KV memory, which compares them or answers a question with
        them.
        """
        self._memory.on_hashed(event, now)

    def status(self, now: float) -> dict[str, Any]:
        """Return ``kv_debug``: counts of pages remembered, compared and found wrong; None without ``--kv-debug``."""
        return {"kv_debug": self._debug.info()}

    def metrics(self, now: float) -> list[Family]:
        """Return the metrics of the hash comparisons; none without ``--kv-debug``."""
        return self._debug.metrics()

    def warning(self, now: float) -> str | None:
        """Return how many hashes of KV differed, and the last request concerned; None if none did.

        Differences after recomputing a page don't count.
        """
        return self._debug.problem or None
