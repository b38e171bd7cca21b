"""KV pages beyond the pool: what goes to host memory and to a store, and when it comes back.

::

    computed, shared ──(write_through, or its second use)──▶ host ──▶ store
    evicted from the pool ──(write_back, write_through)────▶ host ──▶ store
    a request arrives: what neither pool nor host have of it ◀── store, into host pages (prefetch)
    a request is admitted: what the host has behind the cached prefix ──▶ pool, before the step that needs it

The tree knows the pool alone; host and store are asked by hash (``mem_cache/page_hash.py``). Copies between pool and
host are done by the worker in the order in which they are told, between the steps. ``before`` the next step go those
of pages that are about to be overwritten or needed, ``after`` it those of what it computes.

A store is never waited for longer than ``--hicache-storage-prefetch-policy`` says: not at all (best_effort), until it
has answered (wait_complete), or for a time that grows with what was asked (timeout); and no longer than
``LONGEST_WAIT`` in any case.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..mem_cache.host_tier import HostTier
from ..mem_cache.page_hash import model_seed, prompt_hashes
from ..messages.base import I32, Message, pack_i32
from ..messages.tiers import (
    CopyPages,
    DropPages,
    FetchPages,
    PagesCopied,
    PagesFetched,
    PagesKept,
    PagesStored,
    StorePages,
    StoreState,
    TierEvent,
)
from ..messages.worker import WorkerReady
from ..runtime.options import ServerOptions
from .kept_pages import KeptPages
from .req import Req

TO_HOST, TO_POOL = 0, 1
LEAST_FETCH = 256
"""Tokens: fewer are computed sooner than asked for (SGLang's prefetch threshold)."""
SELECTIVE_HITS = 2
BACKLOG_PAGES = 1 << 16
STORE_BATCH = 64
"""Pages under way to the store at a time: what is pinned for it."""
STORE_PAUSE = 1.0
"""Seconds before it is given anything again after it has failed."""
LONGEST_WAIT = 10.0
"""Seconds, for a store that hangs."""
WAIT_BASE, WAIT_PER_KILOTOKEN = 0.25, 0.1
"""Seconds that the policy "timeout" waits."""


class Fetch(NamedTuple):
    """Pages on their way from the store."""

    rid: str
    hashes: list[bytes]
    pages: list[int]
    asked_at: float
    patience: float


class Storing(NamedTuple):
    """Pages on their way to the store."""

    hashes: list[bytes]
    pages: list[int]


class TierCounts:
    """Pages since start, for /server_info and metrics."""

    def __init__(self) -> None:
        self.saved = 0
        """To the host."""
        self.loaded = 0
        """From there, into the pool."""
        self.stored = 0
        self.fetched = 0
        self.asked = 0
        """Of the store."""
        self.skipped = 0
        """Not stored: more came than the store takes."""
        self.copy_seconds = 0.0
        self.fetch_seconds = 0.0
        self.store_seconds = 0.0


class KVTiers:
    """Owner of the host's pages, in the scheduler's process. Only made where ``--enable-hierarchical-cache`` is."""

    def __init__(self, options: ServerOptions, worker: WorkerReady) -> None:
        self.host = HostTier(worker.host_pages)
        self.counts = TierCounts()
        self.store = StoreState("closed", "")
        self._has_store = options.hicache_storage_backend is not None
        self._policy = options.hicache_write_policy
        self._patience = options.hicache_storage_prefetch_policy
        self._page_size = options.page_size
        self._seed = model_seed(worker.fingerprint, worker.layout)
        self._ids = itertools.count(1)
        self._before: list[tuple[int, int, int]] = []
        self._after: list[tuple[int, int, int]] = []
        self._store_commands: list[Message] = []
        self._backlog: OrderedDict[bytes, None] = OrderedDict()
        self._storing: dict[int, Storing] = {}
        self._store_again_at = 0.0
        self._stored: set[bytes] = set()
        """Of what the host has, what the store has as well."""
        self._fetches: dict[int, Fetch] = {}
        self._fetching: dict[str, int] = {}
        self._insistent: set[str] = set()
        self.kept = KeptPages(self, lambda: next(self._ids))
        self._copy_commands: list[Message] = []
        self._newest_copy = 0
        self.copied = 0
        """The newest ``CopyPages`` that the worker has done."""

    # --- names ---

    def hashes(self, req: Req, limit: int) -> list[bytes]:
        """Of the request's whole pages within its first ``limit`` tokens."""
        pages = limit // self._page_size
        if len(req.page_hashes) < pages:
            known = req.token_ids[: req.known_len // self._page_size * self._page_size]
            req.page_hashes = prompt_hashes(self._seed, known, self._page_size, req.msg.extra_key)
        return req.page_hashes[:pages]

    @property
    def has_store(self) -> bool:
        """Whether there is a third tier."""
        return self._has_store

    def seed(self) -> bytes:
        """What the hashes of the tree's nodes begin with."""
        return self._seed

    # --- pool → host ---

    def stored(self, hashes: Sequence[bytes], pages: I32) -> None:
        """The tree has got these pages, which steps compute that were sent; or see ``defer``."""
        if self._policy == "write_through":
            self._save(hashes, pages, self._before)

    def mark(self) -> int:
        """Where ``defer`` begins."""
        return len(self._before)

    def defer(self, mark: int) -> None:
        """What was saved since ``mark`` is computed by the step that is being planned. Nothing is evicted in that plan
        any more. (A request that is retracted leaves pages earlier in it, which may be another's in the same step.)
        """
        self._after += self._before[mark:]
        del self._before[mark:]

    def used(self, req: Req, pages: I32, hits: int) -> None:
        """The request begins with these, which the tree has had; their end was found ``hits`` times by now."""
        hashes = self.hashes(req, len(pages) * self._page_size)
        self.host.use(hashes)
        if self._policy == "write_through_selective" and hits >= SELECTIVE_HITS:
            self._save(hashes, pages, self._before)

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """The tree is about to give them back; what overwrites them is computed by the next step at the soonest."""
        if self._policy != "write_through_selective":
            self._save(hashes, pages, self._before)

    def condemned(self, req: Req) -> None:
        """What the request computed, or began with, is bad, from whichever page on."""
        hashes = self.hashes(req, req.known_len)
        self.host.drop(hashes)
        for page_hash in hashes:
            self._backlog.pop(page_hash, None)
            self._stored.discard(page_hash)
        if self._has_store and hashes:
            self._store_commands.append(DropPages(b"".join(hashes)))

    def _save(self, hashes: Sequence[bytes], pages: I32, to: list[tuple[int, int, int]]) -> None:
        for page_hash, page in zip(hashes, pages.tolist(), strict=True):
            if page_hash in self.host:
                continue
            host_page = self.host.keep(page_hash)
            if host_page is None:
                return
            to.append((TO_HOST, page, host_page))
            self.counts.saved += 1
            self._remember(page_hash)

    # --- what somebody wants to find again ---

    def save(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Whatever the policy is: to the host, and before anything else to the store. Not within a plan."""
        self.host.use(hashes)
        self._save(hashes, pages, self._before)
        for page_hash in reversed(hashes):
            if page_hash in self._backlog:
                self._backlog.move_to_end(page_hash, last=False)

    def is_saving(self, hashes: Sequence[bytes]) -> bool:
        """See ``SavesPages``."""
        under_way = {page_hash for storing in self._storing.values() for page_hash in storing.hashes}
        return any(page_hash in self._backlog or page_hash in under_way for page_hash in hashes)

    def save_again(self, hashes: Sequence[bytes]) -> None:
        """See ``SavesPages``."""
        self._stored.difference_update(hashes)
        for page_hash in hashes:
            if page_hash in self.host:
                self._remember(page_hash)

    def tell_store(self, message: Message) -> None:
        """See ``SavesPages``."""
        self._store_commands.append(message)

    def insist(self, rid: str) -> None:
        """This request, which comes now, is worth waiting for the store."""
        self._insistent.add(rid)

    def _remember(self, page_hash: bytes) -> None:
        """It is to go to the store as well."""
        if not self._has_store or page_hash in self._stored:
            return
        self._backlog[page_hash] = None
        if len(self._backlog) > BACKLOG_PAGES:
            self._backlog.popitem(last=False)
            self.counts.skipped += 1

    # --- host → pool ---

    def find(self, req: Req, cached: int, limit: int) -> list[int]:
        """The host pages of what follows the first ``cached`` tokens, within ``limit``. Uses nothing."""
        return self.host.match(self.hashes(req, limit)[cached // self._page_size :])

    def load(self, req: Req, cached: int, host_pages: Sequence[int], pool_pages: I32) -> None:
        """Copy them into the pool, before the next step."""
        self._before += [(TO_POOL, page, host) for page, host in zip(pool_pages.tolist(), host_pages, strict=True)]
        self.counts.loaded += len(host_pages)
        self.host.use(req.page_hashes[: cached // self._page_size + len(host_pages)])

    # --- store → host ---

    def prefetch(self, req: Req, cached: int, now: float) -> None:
        """Ask the store for what neither pool nor host have of a request that has just come."""
        if not self._has_store or req.rid in self._fetching:
            return
        hashes = self.hashes(req, req.longest_reusable_prefix)
        known = cached // self._page_size
        known += len(self.host.match(hashes[known:]))
        room = self.host.num_pages // 2 - sum(len(f.pages) for f in self._fetches.values())
        missing = hashes[known : known + max(0, room)]
        if len(missing) * self._page_size < LEAST_FETCH:
            return
        pages = self.host.reserve(len(missing))
        fetch_id = next(self._ids)
        tokens = len(pages) * self._page_size
        policy = "wait_complete" if req.rid in self._insistent else self._patience
        patience = {"best_effort": 0.0, "wait_complete": LONGEST_WAIT}.get(
            policy, min(LONGEST_WAIT, WAIT_BASE + WAIT_PER_KILOTOKEN * tokens / 1000)
        )
        self._fetches[fetch_id] = Fetch(req.rid, missing[: len(pages)], pages, now, patience)
        self._fetching[req.rid] = fetch_id
        self.counts.asked += len(pages)
        asked = b"".join(missing[: len(pages)])
        self._store_commands.append(FetchPages(fetch_id, asked, pack_i32(np.array(pages, dtype=np.int32))))

    def must_wait(self, req: Req, now: float) -> bool:
        """Whether the request is not to be admitted yet, since more of it may be here soon."""
        fetch = self._fetches.get(self._fetching.get(req.rid, 0))
        return fetch is not None and now < fetch.asked_at + fetch.patience

    def timeout(self, now: float) -> float | None:
        """Seconds until somebody has waited long enough; None: nobody waits."""
        left = [f.asked_at + f.patience - now for f in self._fetches.values() if f.patience and f.rid in self._fetching]
        left = [seconds for seconds in left if seconds > 0]
        if (keeping := self.kept.timeout(now)) is not None:
            left.append(keeping)
        return min(left) if left else None

    def forget(self, rid: str) -> None:
        """The request has ended, or begun. What is on its way for it is kept for others."""
        self._fetching.pop(rid, None)
        self._insistent.discard(rid)

    # --- the worker ---

    def take_before(self) -> list[Message]:
        """What the worker has to be told before the step that was just planned."""
        self._seal(self._before)
        self._before = []
        return self._take()

    def take(self, now: float) -> list[Message]:
        """All that it has to be told, with no step planned that was not sent."""
        self.fence()
        if now >= self._store_again_at:
            self._next_batch()
        self.kept.advance(now)
        return self._take() + self._take_store_commands()

    def fence(self) -> int:
        """What ``copied`` has come to when no copy touches memory any more that can be had now. Not within a plan."""
        self._seal(self._before + self._after)
        self._before, self._after = [], []
        return self._newest_copy

    def _seal(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self._newest_copy = next(self._ids)
            triples = pack_i32(np.array(copies, dtype=np.int32).ravel())
            self._copy_commands.append(CopyPages(self._newest_copy, triples))

    def _take(self) -> list[Message]:
        messages, self._copy_commands = self._copy_commands, []
        return messages

    def _take_store_commands(self) -> list[Message]:
        messages, self._store_commands = self._store_commands, []
        return messages

    def _next_batch(self) -> None:
        """Have the store write what it has yet to, a batch at a time."""
        if self._storing or not self._backlog:
            return
        hashes: list[bytes] = []
        pages: list[int] = []
        while self._backlog and len(hashes) < STORE_BATCH:
            page_hash, _ = self._backlog.popitem(last=False)
            page = self.host.page(page_hash)
            if page is not None:
                hashes.append(page_hash)
                pages.append(page)
        if not hashes:
            return
        store_id = next(self._ids)
        self.host.pin(pages)
        self._storing[store_id] = Storing(hashes, pages)
        self._stored.update(hashes)
        packed = pack_i32(np.array(pages, dtype=np.int32))
        self._store_commands.append(StorePages(store_id, b"".join(hashes), packed))

    def on_event(self, event: TierEvent, now: float) -> None:
        """What the worker says."""
        if isinstance(event, PagesCopied):
            self.copied = event.id
            self.counts.copy_seconds += event.seconds
        elif isinstance(event, StoreState):
            self.store = event
        elif isinstance(event, PagesStored):
            self._on_stored(event, now)
        elif isinstance(event, PagesKept):
            self.kept.on_kept(event)
        elif isinstance(event, PagesFetched):
            fetch = self._fetches.pop(event.id)
            self.host.settle(fetch.pages, fetch.hashes[: event.count])
            self._stored.update(fetch.hashes[: event.count])
            self.counts.fetched += event.count
            self.counts.fetch_seconds += event.seconds
            if self._fetching.get(fetch.rid) == event.id:
                del self._fetching[fetch.rid]

    def _on_stored(self, event: PagesStored, now: float) -> None:
        hashes, pages = self._storing.pop(event.id)
        self.host.unpin(pages)
        self.counts.stored += event.count
        self.counts.store_seconds += event.seconds
        if event.error:
            # Once more, as far as the host has them by then.
            self._stored.difference_update(hashes)
            self._backlog.update(dict.fromkeys(hashes))
            self._store_again_at = now + STORE_PAUSE
        if len(self._stored) > 2 * self.host.num_pages:
            self._stored = {page_hash for page_hash in self._stored if page_hash in self.host}

    def flush(self) -> int:
        """Forget what the host has; the store keeps its own. Returns the pages."""
        self._backlog.clear()
        return self.host.clear()

    def info(self) -> dict[str, Any]:
        """JSON-ready: pages, and what became of them."""
        host = self.host
        return {
            "host_pages": {"total": host.num_pages, "used": len(host), "free": host.free_pages},
            "host_evicted": host.evicted_pages,
            "store": msgspec.to_builtins(self.store) if self._has_store else None,
            "fetching": len(self._fetches),
            "backlog": len(self._backlog),
            **vars(self.counts),
        }

    def check_invariants(self) -> None:
        """Raise ``InvariantViolation``."""
        self.host.check_invariants()
