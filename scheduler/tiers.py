"""KV pages beyond the pool: what goes to host memory and to a store, and when it comes back.

::

    computed, shared ──(write_through, or its second use)──▶ host ──▶ store
    evicted from the pool ──(write_back, write_through)────▶ host ──▶ store
    a running request is retracted ────────────────────────▶ host ──▶ store
    a request arrives: what neither pool nor host have of it ◀── store, into host pages (prefetch)
    a request whose KV a peer may send: how much of it has the store? (look), and perhaps the same (fetch)
    a request is admitted: what the host has behind the cached prefix ──▶ pool, before the step that needs it

The tree knows the pool alone; host and store are asked by hash (``mem_cache/page_hash.py``). Copies between pool and
host are done by the worker in the order in which they are told, between the steps. ``before`` the next step go those
of pages that are about to be overwritten or needed, ``after`` it those of what it computes.

Where layers have windows (``mem_cache/window_pages.py``) a host page has both: it is saved while its window page is
still there, so when it is computed (write_through alone); and of what is loaded, those get window pages that the next
token sees.

A store (``store_link.py``) is waited for as ``--hicache-storage-prefetch-policy`` says: while the time that is left is
less than computing the same tokens takes (auto), not at all (best_effort), until it has answered (wait_complete), or
for a time that grows with what was asked (timeout); and no longer than ``LONGEST_WAIT`` in any case.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..mem_cache.host_tier import HostTier
from ..mem_cache.page_hash import model_seed
from ..mem_cache.window_pages import WindowPages
from ..messages.base import I32, Message, pack_i32
from ..messages.metrics import Family
from ..messages.outputs import CachedBeyond
from ..messages.tiers import (
    CopyPages,
    PageCopy,
    PagesCopied,
    PagesFetched,
    PagesFound,
    PagesKept,
    PagesStored,
    StoreState,
    TierEvent,
)
from ..messages.worker import WorkerReady
from ..runtime.metrics import Metrics, counter, gauge, read
from ..runtime.options import ServerOptions
from .copy_pace import CopyPace
from .page_names import PageNames
from .req import Req
from .store_link import METRICS as STORE_METRICS
from .store_link import StoreLink, Worth, as_long_as_any
from .tier_counts import NOTHING_BEYOND, TierCounts

SELECTIVE_HITS = 2
NONE = 0
"""Where there is no window page (``WindowPages.page_of``)."""


class KVTiers:
    """Owner of the host's pages, in the scheduler's process. Only made where ``--enable-hierarchical-cache`` is."""

    def __init__(self, options: ServerOptions, worker: WorkerReady) -> None:
        self.host = HostTier(worker.host_pages)
        self.counts = TierCounts()
        self._ids = itertools.count(1)
        has_store = options.hicache_storage_backend is not None
        page_bytes = worker.layout.page_bytes
        self.store = StoreLink(options, self.host, self.counts, self._ids, page_bytes) if has_store else None
        self._policy = options.hicache_write_policy
        self.page_size = options.page_size
        self._page_bytes = page_bytes
        # What is rounded there has names of its own: who keeps pages as they are must not find it.
        rounding = "" if options.hicache_host_dtype == "auto" else f" in {options.hicache_host_dtype}"
        self.windows: WindowPages | None = None
        """``KVMemory``'s, where layers have windows."""
        self.names = PageNames(model_seed(worker.fingerprint + rounding, worker.layout), options.page_size)
        self._before: list[tuple[int, int, int]] = []
        self._after: list[tuple[int, int, int]] = []
        self._copy_commands: list[Message] = []
        self._newest_copy = self._sealed = 0
        groups = len(worker.layout.groups)
        self.pace = CopyPace(page_bytes / groups)
        self.copied = 0
        """The newest ``CopyPages`` that the worker has done."""

    # --- names ---

    def hashes(self, req: Req, limit: int, first: int = 0) -> list[bytes]:
        """See ``PageNames.of``."""
        return self.names.of(req, limit, first)

    def seed(self) -> bytes:
        """What the hashes of the tree's nodes begin with."""
        return self.names.seed

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
        hashes = self.hashes(req, len(pages) * self.page_size)
        self.host.use(hashes)
        if self._policy == "write_through_selective" and hits >= SELECTIVE_HITS:
            self._save(hashes, pages, self._before)

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """The tree is about to give them back; what overwrites them is computed by the next step at the soonest."""
        if self._policy != "write_through_selective":
            self._save(hashes, pages, self._before)

    def keep(self, req: Req, pages: I32) -> None:
        """The request gives way, these are its first pages: it comes back for them, whatever the policy says of others.
        What it lets go of may be overwritten by the next step at the soonest.
        """
        self._save(self.hashes(req, len(pages) * self.page_size), pages, self._before)

    def condemned(self, req: Req, kept: int) -> None:
        """Forget the request's pages, but for those of its first ``kept`` tokens: they are bad, or may be."""
        hashes = self.hashes(req, req.known_len, kept // self.page_size)
        self.host.drop(hashes)
        if self.store is not None:
            self.store.drop(hashes)

    def _save(self, hashes: Sequence[bytes], pages: I32, to: list[tuple[int, int, int]]) -> None:
        behind = self._window_pages(pages)
        for page_hash, page, window_page in zip(hashes, pages.tolist(), behind, strict=True):
            if page_hash in self.host:
                continue
            if window_page == NONE:
                return  # without it nobody can go on from here, nor from what follows
            host_page = self.host.keep(page_hash)
            if host_page is None:
                return
            to.append((PageCopy.TO_HOST, page, host_page))
            if window_page is not None:
                to.append((PageCopy.WINDOW_TO_HOST, window_page, host_page))
            self.counts.saved += 1
            if self.store is not None:
                self.store.remember(page_hash)

    def _window_pages(self, pages: I32) -> list[int | None]:
        """Which window page each of these has, ``NONE`` for none; None where there are no windows."""
        return [None] * len(pages) if self.windows is None else self.windows.page_of[pages].tolist()

    def save(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Whatever the policy is, somebody wants to find these again: to the host, and before anything else to the
        store. ``pages``: of the first of them; the host has the others. Not within a plan.
        """
        self.host.use(hashes)
        self._save(hashes[: len(pages)], pages, self._before)
        if self.store is not None:
            self.store.save_first(hashes)

    # --- host → pool ---

    def find(self, req: Req, cached: int, limit: int) -> list[int]:
        """The host pages of what follows the first ``cached`` tokens, within ``limit``. Uses nothing."""
        return self.host.match(self.hashes(req, limit, cached // self.page_size))

    def load(
        self, req: Req, cached: int, host_pages: Sequence[int], pool_pages: I32, *, more: bool = False
    ) -> set[bytes]:
        """Copy them into the pool, before the next step, and into the window pages that these have. What a request
        finds that had its turn before is its own, and no hit. ``more``: it has found some before. Returns which of them
        the store brought just now.
        """
        behind = self._window_pages(pool_pages)
        for page, window_page, host_page in zip(pool_pages.tolist(), behind, host_pages, strict=True):
            self._before.append((PageCopy.TO_POOL, page, host_page))
            if window_page:
                self._before.append((PageCopy.WINDOW_TO_POOL, window_page, host_page))
        self.counts.loaded += len(host_pages)
        first = cached // self.page_size
        hashes = req.page_hashes[: first + len(host_pages)]
        self.host.use(hashes)
        brought = self.store.take_brought(hashes[first:]) if self.store is not None else set()
        if not req.times.admitted or (req.loading is not None and req.loading.is_hit):
            tokens = len(brought) * self.page_size
            found = CachedBeyond(len(host_pages) * self.page_size - tokens, tokens)
            self.counts.hit(found)
            before = req.cached_beyond if more and req.cached_beyond is not None else NOTHING_BEYOND
            req.cached_beyond = CachedBeyond(before.host + found.host, before.store + found.store)
        return brought

    # --- store → host ---

    def prefetch(self, req: Req, cached: int, now: float, worth: Worth = as_long_as_any) -> None:
        """Ask the store for what neither pool nor host have of a request that has just come. ``worth``: seconds that
        computing so many tokens takes.
        """
        if self.store is None:
            return
        self.store.prefetch(req.rid, self._missing(req, cached), now, worth)

    def look(self, req: Req, cached: int, now: float) -> None:
        """Ask the store how much it has of that; see ``StoreLink.look``."""
        if self.store is not None:
            self.store.look(req.rid, self._missing(req, cached), now)

    def fetch(self, req: Req, cached: int, pages: int, most_wait: float, now: float) -> bool:
        """Have the store bring so many pages of that, for which the request waits (``must_wait``), ``most_wait``
        seconds at most; whether it does.
        """
        if self.store is None:
            return False
        self.store.prefetch(req.rid, self._missing(req, cached)[:pages], now, lambda _: most_wait, most_wait)
        return self.store.must_wait(req.rid, now)

    def _missing(self, req: Req, cached: int) -> list[bytes]:
        """Of a request, ``cached`` tokens of which the pool has, what the host does not have behind them."""
        hashes = self.hashes(req, req.longest_reusable_prefix, cached // self.page_size)
        return hashes[len(self.host.match(hashes)) :]

    def must_wait(self, req: Req, now: float) -> bool:
        """Whether the request is not to be admitted yet, since more of it may be here soon."""
        return self.store is not None and self.store.must_wait(req.rid, now)

    def timeout(self, now: float) -> float | None:
        """Seconds until somebody has waited long enough, or something is to be tried again; None: no such thing."""
        return self.store.timeout(now) if self.store is not None else None

    def forget(self, rid: str) -> None:
        """The request has ended, or begun."""
        if self.store is not None:
            self.store.forget(rid)

    # --- the worker ---

    def take_before(self) -> list[Message]:
        """What the worker has to be told before the step that was just planned."""
        self._seal(self._before)
        self._before = []
        return self._take()

    def copy_ms(self) -> float:
        """What the copies take that were told since this was last asked."""
        return self.pace.new_ms(self._sealed + len(self._before) + len(self._after))

    def take(self, now: float) -> list[Message]:
        """All that it has to be told, with no step planned that was not sent."""
        self.fence()
        return self._take() + (self.store.take(now) if self.store is not None else [])

    def fence(self) -> int:
        """What ``copied`` has come to when no copy touches memory any more that can be had now. Not within a plan."""
        self._seal(self._before + self._after)
        self._before, self._after = [], []
        return self._newest_copy

    def _seal(self, copies: list[tuple[int, int, int]]) -> None:
        if copies:
            self._newest_copy = next(self._ids)
            self._sealed += len(copies)
            self.pace.sent(self._newest_copy, len(copies))
            triples = pack_i32(np.array(copies, dtype=np.int32).ravel())
            self._copy_commands.append(CopyPages(self._newest_copy, triples))

    def _take(self) -> list[Message]:
        messages, self._copy_commands = self._copy_commands, []
        return messages

    def on_event(self, event: TierEvent, now: float) -> None:
        """What the worker says."""
        if isinstance(event, PagesCopied):
            self.copied = event.id
            self.counts.copy_seconds += event.seconds
            self.pace.learn(event.id, event.seconds)
            return
        assert self.store is not None
        if isinstance(event, StoreState):
            self.store.on_state(event, now)
        elif isinstance(event, PagesStored):
            self.store.on_stored(event, now)
        elif isinstance(event, PagesKept):
            self.store.kept.on_kept(event)
        elif isinstance(event, PagesFetched):
            self.store.on_fetched(event, now)
        elif isinstance(event, PagesFound):
            self.store.sight.on_found(event)

    def flush(self) -> int:
        """Forget what the host has; the store keeps its own. Returns the pages."""
        if self.store is not None:
            self.store.forget_backlog()
        return self.host.clear()

    def problem(self, now: float) -> str:
        """What somebody should look after, "" for nothing."""
        return self.store.problem(now) if self.store is not None else ""

    def metrics(self) -> list[Family]:
        """Return the metrics of the host tier and of its store."""
        return read(METRICS, self) + read(STORE_METRICS, self.store)

    def info(self) -> dict[str, Any]:
        """JSON-ready: pages, and what became of them."""
        host = self.host
        return {
            "host_pages": {"total": host.num_pages, "used": len(host), "free": host.free_pages},
            "page_bytes": self._page_bytes,
            "host_evicted": host.evicted_pages,
            "store": msgspec.structs.asdict(self.store.state) if self.store is not None else None,
            "fetching": self.store.fetching if self.store is not None else 0,
            "backlog": self.store.backlog if self.store is not None else 0,
            **vars(self.counts),
        }

    def check_invariants(self) -> None:
        """Raise ``InvariantViolation``."""
        self.host.check_invariants()


METRICS: Metrics[KVTiers] = (
    gauge(
        "pdserve_kv_host_tokens",
        "KV in host memory, behind the pool: used, and free.",
        lambda t: {"used": len(t.host) * t.page_size, "free": (t.host.num_pages - len(t.host)) * t.page_size},
        "state",
        note="Absent without [tiers](tiers.md), as are all metrics of stores and tiers.",
    ),
    counter(
        "pdserve_prefix_cache_beyond_tokens_total",
        "Prompt tokens found in the prefix cache but not in the KV pool, by the tier that had them.",
        lambda t: {"host": t.counts.hit_host, "store": t.counts.hit_store},
        "tier",
        note="Tiers: `host` memory, or brought by the `store`.",
    ),
    counter(
        "pdserve_kv_tier_tokens_total",
        "KV copied between tiers.",
        lambda t: {
            ("pool", "host"): t.counts.saved * t.page_size,
            ("host", "pool"): t.counts.loaded * t.page_size,
            ("host", "store"): t.counts.stored * t.page_size,
            ("store", "host"): t.counts.fetched * t.page_size,
        },
        "source",
        "target",
        note="Tiers: `pool`, `host`, `store`.",
    ),
    counter(
        "pdserve_kv_tier_seconds_total",
        "Time spent copying KV between tiers: copies between pool and host hold up steps, those of the store do not.",
        lambda t: {"copy": t.counts.copy_seconds, "store": t.counts.store_seconds, "fetch": t.counts.fetch_seconds},
        "work",
        note="Work: `copy` between pool and host, `store` and `fetch` between host and store.",
    ),
)
