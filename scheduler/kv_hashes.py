"""Reports what the KV pool holds of a prompt, as hashes, so that an engineer can compare two instances."""

from __future__ import annotations

from ..messages.base import unpack_i32
from ..messages.kv_debug import HashedGroup, KVHashes, KVHashesReq, PagesHashed
from ..messages.question import Refused
from ..messages.worker import KVLayout
from .kv_memory import KVMemory
from .outbox import Outbox

NO_DEBUG = "this instance takes no hashes of its KV; start it with --kv-debug"


def answer_hashes(ask: KVHashesReq, memory: KVMemory, layout: KVLayout, outbox: Outbox) -> None:
    """Answer with the hashes of a prompt's cached pages once the worker has computed them.

    The pages count as used. Steps wait only for the hashing itself.
    """
    if memory.debug is None:
        outbox.reply(ask, Refused(501, NO_DEBUG))
        return
    size, tokens = memory.page_size, unpack_i32(ask.input_ids)
    # The tokens may be anything, and no more than the pool holds are cached: the rest must not hold up the loop.
    tokens = tokens[: min(len(tokens), memory.max_total_tokens) // size * size]
    namespaces = ["", *memory.debug.namespaces] if ask.extra_key is None else [ask.extra_key]
    namespaces = [name for name in namespaces if memory.cached_len(tokens[:size], name)] or namespaces[:1]
    key = max(namespaces, key=lambda namespace: memory.cached_len(tokens, namespace))
    pages = memory.pages_with_kv(None, tokens, key)

    def tell(event: PagesHashed) -> None:
        groups = [
            HashedGroup(group.layers, group.parts, hashes)
            for group, hashes in zip(layout.groups, event.hashes, strict=True)
        ]
        outbox.reply(ask, KVHashes(len(pages) * size, size, key, event.order, groups))

    memory.debug.glance(pages, tell)
