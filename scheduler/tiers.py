"""KV pages cached in tiers: what goes to host memory and to a store, and when it comes back.

::

    computed, shared ──(write_through, or its second use)──▶ host ──▶ store
    evicted from the pool ──(write_back, write_through)────▶ host ──▶ store
    a running request is retracted ────────────────────────▶ host ──▶ store
    a request arrives: what neither pool nor host have of it ◀── store, into host pages (prefetch)
    a request with KV that a peer may send: how much of it has the store? (look), and perhaps a fetch
    a request is admitted: what the host has after the cached prefix ──▶ pool, before the step that needs it

The tree knows the pool only; host and store are asked by hash (``mem_cache/page_hash.py``). The worker makes copies
between pool and host in the order of its messages, between the steps. Copies of pages that are about to be overwritten
or needed go ``before`` the next step. Copies of what that step computes go ``after`` it.

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
from .copy_pace import CopyPace
from .options import SchedulerOptions
from .page_names import PageNames
from .req import Req
from .store_link import METRICS as STORE_METRICS
from .store_link import StoreLink, Worth, as_long_as_any
from .tier_counts import NOTHING_BEYOND, TierCounts

SELECTIVE_HITS = 2
NONE = 0
"""Number that stands for no window page (``WindowPages.page_of``)."""


class KVTiers:
    """Owner of the host's pages, in the scheduler's process. Made only with ``--enable-hierarchical-cache``."""

    def __init__(self, options: SchedulerOptions, worker: WorkerReady) -> None:
        self.host = HostTier(worker.host_pages)
        self.counts = TierCounts()
        self._ids = itertools.count(1)
        has_store = options.hicache_storage_backend is not None
        page_bytes = worker.layout.page_bytes
        self.store = StoreLink(options, self.host, self.counts, self._ids, page_bytes) if has_store else None
        self._policy = options.hicache_write_policy
        self.page_size = options.page_size
        self._page_bytes = page_bytes
        # Pages rounded in host memory have names of their own: instances that keep pages as they are must not find
        # them.
        rounding = "" if options.hicache_host_dtype == "auto" else f" in {options.hicache_host_dtype}"
        self.windows: WindowPages | None = None
        """``KVMemory``'s window pages, if layers have windows."""
        self.names = PageNames(model_seed(worker.fingerprint + rounding, worker.layout), options.page_size)
        self._before: list[tuple[int, int, int]] = []
        self._after: list[tuple[int, int, int]] = []
        self._copy_commands: list[Message] = []
        self._newest_copy = self._sealed = 0
        groups = len(worker.layout.groups)
        self.pace = CopyPace(page_bytes / groups)
        self.copied = 0
        """Id of the newest ``CopyPages`` that the worker has done."""

    # --- names ---

    def hashes(self, req: Req, limit: int, first: int = 0) -> list[bytes]:
        """Return the hashes of a request's pages: see ``PageNames.of``."""
        return self.names.of(req, limit, first)

    def seed(self) -> bytes:
        """Return the seed of the hashes of the tree's nodes."""
        return self.names.seed

    # --- pool → host ---

    def stored(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Save pages that have entered the tree, by policy.

        Steps that were sent compute them; otherwise see ``defer``.
        """
        if self._policy == "write_through":
            self._save(hashes, pages, self._before)

    def mark(self) -> int:
        """Return the mark from which ``defer`` begins."""
        return len(self._before)

    def defer(self, mark: int) -> None:
        """Put off what was saved since ``mark`` until after the step that is being planned, which computes it.

        Nothing more is evicted in that plan. (Retraction comes earlier in a plan, and its pages may get a new owner in
        the same step.)
        """
        self._after += self._before[mark:]
        del self._before[mark:]

    def used(self, req: Req, pages: I32, hits: int) -> None:
        """Note that a request begins with these cached pages.

        Save them, by policy, if their end was found ``hits`` times.
        """
        hashes = self.hashes(req, len(pages) * self.page_size)
        self.host.use(hashes)
        if self._policy == "write_through_selective" and hits >= SELECTIVE_HITS:
            self._save(hashes, pages, self._before)

    def leaving(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Save pages that the tree is about to free, by policy. The next step is the first that may overwrite them."""
        if self._policy != "write_through_selective":
            self._save(hashes, pages, self._before)

    def keep(self, req: Req, pages: I32) -> None:
        """Save the first pages of a request that is retracted, under any policy: it will load them again.

        The next step is the first that may overwrite what it frees.
        """
        self._save(self.hashes(req, len(pages) * self.page_size), pages, self._before)

    def condemned(self, req: Req, kept: int) -> None:
        """Forget the request's pages beyond its first ``kept`` tokens: they are bad, or may be."""
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
                return  # without it no request can continue from here, nor from what follows
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
        """Return the window page of each of these, ``NONE`` if it has none; None for each if there are no windows."""
        return [None] * len(pages) if self.windows is None else self.windows.page_of[pages].tolist()

    def save(self, hashes: Sequence[bytes], pages: I32) -> None:
        """Save these pages under any policy, to the host, and to the store before anything else.

        ``pages``: pool pages of the first of them; the host has the others. Not valid within a plan.
        """
        self.host.use(hashes)
        self._save(hashes[: len(pages)], pages, self._before)
        if self.store is not None:
            self.store.save_first(hashes)

    # --- host → pool ---

    def find(self, req: Req, cached: int, limit: int) -> list[int]:
        """Return the host pages that follow the first ``cached`` tokens, within ``limit``. Does not count as a use."""
        return self.host.match(self.hashes(req, limit, cached // self.page_size))

    def load(
        self, req: Req, cached: int, host_pages: Sequence[int], pool_pages: I32, *, more: bool = False
    ) -> set[bytes]:
        """Copy host pages into the pool, before the next step, and into the window pages that these have.

        Return the hashes of those that the store brought just now. If the request was admitted before, the pages are
        its own and count as no hit. ``more``: the request has found some before.
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
        """Ask the store for what neither pool nor host have of a request that has just arrived.

        ``worth`` returns how many seconds computing a number of tokens takes.
        """
        if self.store is None:
            return
        self.store.prefetch(req.rid, self._missing(req, cached), now, worth)

    def look(self, req: Req, cached: int, now: float) -> None:
        """Ask the store how much it has of what is missing here; see ``StoreLink.look``."""
        if self.store is not None:
            self.store.look(req.rid, self._missing(req, cached), now)

    def fetch(self, req: Req, cached: int, pages: int, most_wait: float, now: float) -> bool:
        """Have the store bring ``pages`` of the missing pages. Return whether the request waits for them
        (``must_wait``).

        It waits at most ``most_wait`` seconds.
        """
        if self.store is None:
            return False
        self.store.prefetch(req.rid, self._missing(req, cached)[:pages], now, lambda _: most_wait, most_wait)
        return self.store.must_wait(req.rid, now)

    def _missing(self, req: Req, cached: int) -> list[bytes]:
        """Return the hashes of what the host lacks after the first ``cached`` tokens, which the pool has."""
        hashes = self.hashes(req, req.longest_reusable_prefix, cached // self.page_size)
        return hashes[len(self.host.match(hashes)) :]

    def must_wait(self, req: Req, now: float) -> bool:
        """Return whether the request is not to be admitted yet, since more of it may be here soon."""
        return self.store is not None and self.store.must_wait(req.rid, now)

    def timeout(self, now: float) -> float | None:
        """Return the seconds until a wait ends or something is to be tried again; None without such a time."""
        return self.store.timeout(now) if self.store is not None else None

    def forget(self, rid: str) -> None:
        """Forget what is fetched for a request that has ended or begun."""
        if self.store is not None:
            self.store.forget(rid)

    # --- the worker ---

    def take_before(self) -> list[Message]:
        """Return the messages for the worker that must precede the step that was just planned."""
        self._seal(self._before)
        self._before = []
        return self._take()

    def copy_ms(self) -> float:
        """Return the milliseconds of the copies added since the last call."""
        return self.pace.new_ms(self._sealed + len(self._before) + len(self._after))

    def take(self, now: float) -> list[Message]:
        """Return all messages for the worker. Every step that was planned must have been sent."""
        self.fence()
        return self._take() + (self.store.take(now) if self.store is not None else [])

    def fence(self) -> int:
        """Return the value of ``copied`` at which no copy touches memory that can be allocated now.

        Not valid within a plan.
        """
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
        """Handle an event of the worker."""
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
        """Forget what the host has; the store keeps its own. Return the number of pages."""
        if self.store is not None:
            self.store.forget_backlog()
        return self.host.clear()

    def problem(self, now: float) -> str:
        """Return the problem that an operator should look at, "" for none."""
        return self.store.problem(now) if self.store is not None else ""

    def metrics(self) -> list[Family]:
        """Return the metrics of the host tier and of its store."""
        return read(METRICS, self) + read(STORE_METRICS, self.store)

    def info(self) -> dict[str, Any]:
        """Return pages and counts, JSON-ready."""
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
        """Check the host tier. Raises ``InvariantViolation``."""
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
