"""KV pages cached in tiers: what goes to host memory and to a store, and when it comes back.

::

    computed, shared ──(write_through, or its second use)──▶ host ──▶ store
    evicted from the pool ──(write_back, write_through)────▶ host ──▶ store
    a running request is retracted ────────────────────────▶ host ──▶ store
    a request arrives: what neither pool nor host have of it ◀── store, into host pages (prefetch)
    a request with KV that a peer may send: how much of it has the store? (look), and perhaps a fetch
    a request is admitted: what the host has after the cached prefix ──▶ pool, before the step that needs it

The tree knows the pool only; host and store are asked by hash (``mem_cache/page_hash.py``).
``pool_copies.py`` says when the worker copies between pool and host.

Where layers have windows (``mem_cache/window_pages.py``) a host page holds both kinds. It is saved while its window
page is still there, so when it is computed (write_through only). Of loaded pages, those that the next token sees get
window pages.

``--hicache-storage-prefetch-policy`` says how long a store (``store_link.py``) is waited for, at most ``LONGEST_WAIT``:

- auto: while the time that is left is less than computing the same tokens takes;
- best_effort: not at all;
- wait_complete: until it has answered;
- timeout: for a time that grows with what was asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from ..mem_cache.host_tier import HostTier
from ..mem_cache.radix_cache import TreeWatcher
from ..mem_cache.window_pages import Windows
from ..messages.base import I32, Message
from ..messages.metrics import Family
from ..messages.outputs import CachedBeyond
from ..messages.tiers import PageCopy, PagesCopied, TierEvent
from ..messages.worker import WorkerReady
from ..runtime.metrics import Metrics, counter, gauge, read
from .options import SchedulerOptions
from .page_names import make_page_names
from .pool_copies import PoolCopies
from .req import Req
from .store_link import NoStore, Store, StoreLink, Worth, as_long_as_any
from .tier_counts import NOTHING_BEYOND, TierCounts

SELECTIVE_HITS = 2
NONE = 0
"""Number that stands for no window page (``WindowPages.page_of``)."""


class KVTiers:
    """Owner of the host's pages, in the scheduler's process. It watches the prefix tree (``TreeWatcher``).

    Made only with ``--enable-hierarchical-cache``. ``windows``: window pages of the pool.
    """

    enabled = True

    def __init__(self, options: SchedulerOptions, worker: WorkerReady, windows: Windows) -> None:
        self.host = HostTier(worker.host_pages)
        self.counts = TierCounts()
        ids, page_bytes = itertools.count(1), worker.layout.page_bytes
        self.store: Store = NoStore()
        if options.hicache_storage_backend is not None:
            self.store = StoreLink(options, self.host, self.counts, ids, page_bytes)
        self._policy = options.hicache_write_policy
        self.page_size = options.page_size
        self._page_bytes = page_bytes
        self._windows = windows
        self.names = make_page_names(options, worker)
        self.copies = PoolCopies(ids, page_bytes / len(worker.layout.groups))
        self.watchers: tuple[TreeWatcher, ...] = (self,)
        """Watchers of the prefix tree."""

    def seed(self) -> bytes:
        """Return the seed of the hashes of the tree's nodes."""
        return self.names.seed

    # --- pool → host ---

    def stored(self, parent: bytes | None, hashes: Sequence[bytes], key: bytes, pages: I32) -> None:
        """Save pages that have entered the prefix tree to host memory, if the policy is ``write_through``.

        ``hashes``: names of the pool pages ``pages``. ``parent`` and ``key`` are not used. The copies are planned for
        before the next step. If the step that is being planned computes the pages, they must be put off
        (``PoolCopies.defer``).
        """
        if self._policy == "write_through":
            self._save(hashes, pages)

    def used(self, req: Req, slots: I32, hits: int) -> None:
        """Note that a request begins with these cached slots, in whole pages, so that host memory keeps them longer.

        Under the policy ``write_through_selective``, save the pages to host memory if their end was found often enough.
        ``hits``: how often.
        """
        hashes = self.names.of(req, len(slots))
        self.host.use(hashes)
        if self._policy == "write_through_selective" and hits >= SELECTIVE_HITS:
            self._save(hashes, slots[:: self.page_size] // self.page_size)

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Save pages that the prefix tree is about to free to host memory, unless the policy is
        ``write_through_selective``.

        The next step is the first that may overwrite them.
        """
        if self._policy != "write_through_selective":
            self._save(hashes, pages)

    def removed(self, hashes: Sequence[bytes]) -> None:
        """Do nothing: the host keeps what the pool has lost."""

    def cleared(self) -> None:
        """Do nothing: the host keeps what the pool has lost."""

    def keep(self, req: Req, pages: I32) -> None:
        """Save the first pages of a request that is retracted, under any policy: it will load them again.

        The next step is the first that may overwrite what it frees.
        """
        self._save(self.names.of(req, len(pages) * self.page_size), pages)

    def condemned(self, req: Req, kept: int) -> None:
        """Remove the request's pages after its first ``kept`` tokens from host memory and the store: their KV may be
        bad.
        """
        hashes = self.names.of(req, req.known_len, kept // self.page_size)
        self.host.drop(hashes)
        self.store.drop(hashes)

    def _save(self, hashes: Sequence[bytes], pages: I32) -> None:
        behind = self._window_pages(pages)
        for page_hash, page, window_page in zip(hashes, pages.tolist(), behind, strict=True):
            if page_hash in self.host:
                continue
            if window_page == NONE:
                return  # without it no request can continue from here, nor from what follows
            host_page = self.host.keep(page_hash)
            if host_page is None:
                return
            self.copies.add(PageCopy.TO_HOST, page, host_page)
            if window_page is not None:
                self.copies.add(PageCopy.WINDOW_TO_HOST, window_page, host_page)
            self.counts.saved += 1
            self.store.backlog.remember(page_hash)

    def _window_pages(self, pages: I32) -> list[int | None]:
        """Return, for each of the pool's full pages ``pages``, the window page with its KV of windowed layers.

        It is ``NONE`` if it was freed, and None for a model without windowed layers.
        """
        found: list[list[int | None]] = [behind.tolist() for behind in self._windows.behind(pages)]
        return found[0] if found else [None] * len(pages)

    def save(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Save these pages to host memory under any policy, and to the store before all other pages.

        ``pages``: pool pages of the first of them; the host has the others. Not valid while a step is being planned.
        """
        self.host.use(hashes)
        self._save(hashes[: len(pages)], pages)
        self.store.backlog.save_first(hashes)

    # --- host → pool ---

    def find(self, req: Req, cached: int, limit: int) -> list[int]:
        """Return the host pages that follow the request's first ``cached`` tokens in a row, up to ``limit`` tokens.

        This does not count as a use.
        """
        return self.host.match(self.names.of(req, limit, cached // self.page_size))

    def load(
        self, req: Req, cached: int, host_pages: Sequence[int], pool_pages: I32, *, more: bool = False
    ) -> set[bytes]:
        """Plan the copies of ``host_pages`` to ``pool_pages``, and to the window pages of these, before the next step.

        Return the hashes of those that the store has just brought. They count as cache hits unless the request was
        admitted before. ``cached``: tokens that precede them. ``more``: the request has loaded a part of this prefix
        before.
        """
        behind = self._window_pages(pool_pages)
        for page, window_page, host_page in zip(pool_pages.tolist(), behind, host_pages, strict=True):
            self.copies.add(PageCopy.TO_POOL, page, host_page)
            if window_page:
                self.copies.add(PageCopy.WINDOW_TO_POOL, window_page, host_page)
        self.counts.loaded += len(host_pages)
        first = cached // self.page_size
        hashes = req.page_hashes[: first + len(host_pages)]
        self.host.use(hashes)
        brought = self.store.take_brought(hashes[first:])
        if not req.times.admitted or (req.loading is not None and req.loading.is_hit):
            tokens = len(brought) * self.page_size
            found = CachedBeyond(len(host_pages) * self.page_size - tokens, tokens)
            self.counts.hit(found)
            before = req.cached_beyond if more and req.cached_beyond is not None else NOTHING_BEYOND
            req.cached_beyond = CachedBeyond(before.host + found.host, before.store + found.store)
        return brought

    # --- store → host ---

    def prefetch(self, req: Req, cached: int, now: float, worth: Worth = as_long_as_any) -> None:
        """Order the store to bring what neither pool nor host have of a request that has just arrived.

        ``cached``: its tokens in the pool. ``worth`` returns how many seconds computing a number of tokens takes.
        """
        if self.store.enabled:  # the names of the missing pages cost time
            self.store.prefetch(req.rid, self._missing(req, cached), now, worth)

    def look(self, req: Req, cached: int, now: float) -> None:
        """Ask the store how much it has of what pool and host lack of a request; the answer comes later.

        ``cached``: its tokens in the pool.
        """
        if self.store.enabled:
            self.store.look(req.rid, self._missing(req, cached), now)

    def fetch(self, req: Req, cached: int, pages: int, most_wait: float, now: float) -> bool:
        """Order the store to bring the first ``pages`` pages that pool and host lack of a request.

        Return whether the request waits for them, at most ``most_wait`` seconds. ``cached``: its tokens in the pool.
        """
        self.store.prefetch(req.rid, self._missing(req, cached)[:pages], now, lambda _: most_wait, most_wait)
        return self.store.must_wait(req.rid, now)

    def _missing(self, req: Req, cached: int) -> list[bytes]:
        """Return the hashes of the request's pages that neither pool nor host have; the pool has ``cached`` tokens."""
        hashes = self.names.of(req, req.longest_reusable_prefix, cached // self.page_size)
        return hashes[len(self.host.match(hashes)) :]

    # --- the worker ---

    def take(self, now: float) -> list[Message]:
        """Remove and return all messages for the worker. Every step that was planned must have been sent."""
        return self.copies.take() + self.store.take(now)

    def on_event(self, event: TierEvent, now: float) -> None:
        """Record copies that the worker has made, or pass its report on to the store's link."""
        if isinstance(event, PagesCopied):
            self.counts.copy_seconds += event.seconds
            self.copies.on_copied(event)
        else:
            self.store.on_event(event, now)

    def flush(self) -> int:
        """Drop all pages of host memory and return how many they were. The store keeps its pages."""
        self.store.backlog.clear()
        return self.host.clear()

    def problem(self, now: float) -> str:
        """Return the problem that an operator should look at, "" for none."""
        return self.store.problem(now) if self.store is not None else ""

    def metrics(self) -> list[Family]:
        """Return the metrics of the host tier and of its store."""
        return read(METRICS, self) + self.store.metrics()

    def info(self) -> dict[str, Any] | None:
        """Return the ``tiers`` part of ``/server_info``, JSON-ready: pages in host memory, the store's state, and
        counts.
        """
        host = self.host
        return {
            "host_pages": {"total": host.num_pages, "used": len(host), "free": host.free_pages},
            "page_bytes": self._page_bytes,
            "host_evicted": host.evicted_pages,
            "store": msgspec.structs.asdict(self.store.state) if self.store.enabled else None,
            "fetching": self.store.fetching,
            "backlog": len(self.store.backlog),
            **vars(self.counts),
        }


class NoTiers:
    """The ``KVTiers`` of an instance without host memory: nothing is saved, and nothing is found."""

    enabled = False
    watchers: tuple[TreeWatcher, ...] = ()

    def __init__(self) -> None:
        self.host = HostTier(0)
        self.store = NoStore()
        self.copies = PoolCopies(itertools.count(1), 1.0)

    def used(self, req: Req, slots: I32, hits: int) -> None:
        """Do nothing: there is no host memory to save pages to."""

    def keep(self, req: Req, pages: I32) -> None:
        """Do nothing: the retracted request recomputes what is not cached."""

    def condemned(self, req: Req, kept: int) -> None:
        """Do nothing: no other tier has the request's bad pages, which come after its first ``kept`` tokens."""

    def save(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Do nothing: there is no tier to save pages to."""

    def find(self, req: Req, cached: int, limit: int) -> list[int]:
        """Return []: no page is in host memory."""
        return []

    def load(
        self, req: Req, cached: int, host_pages: Sequence[int], pool_pages: I32, *, more: bool = False
    ) -> set[bytes]:
        """Raise ``AssertionError``: no pages were found."""
        raise AssertionError(f"pages of host memory were to be loaded for {req.rid}, and there is none")

    def prefetch(self, req: Req, cached: int, now: float, worth: Worth = as_long_as_any) -> None:
        """Do nothing: there is no store to fetch from."""

    def look(self, req: Req, cached: int, now: float) -> None:
        """Do nothing: there is no store to ask."""

    def fetch(self, req: Req, cached: int, pages: int, most_wait: float, now: float) -> bool:
        """Return False: nothing is waited for."""
        return False

    def take(self, now: float) -> list[Message]:
        """Return []: the worker has no copies to make."""
        return []

    def on_event(self, event: TierEvent, now: float) -> None:
        """Raise ``AssertionError``: the worker has no tiers."""
        raise AssertionError(f"the worker sent {event}, and the instance has no tiers")

    def flush(self) -> int:
        """Return 0: no other tier has pages to drop."""
        return 0

    def metrics(self) -> list[Family]:
        """Return []: there are no tiers to measure."""
        return []

    def info(self) -> None:
        """Return None: ``/server_info`` shows that there are no tiers."""


Tiers = KVTiers | NoTiers


def make_tiers(options: SchedulerOptions, worker: WorkerReady, windows: Windows) -> Tiers:
    """Make the tiers behind the pool, or ones that do nothing if the worker has no pages in host memory."""
    return KVTiers(options, worker, windows) if worker.host_pages else NoTiers()


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
