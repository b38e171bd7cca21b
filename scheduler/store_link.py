"""The scheduler's side of a store of KV pages: what is still to be written, what was asked for, and whether it answers.

::

    to be written:   ``store_backlog.py``
    to be read:      prefetch ──▶ fetching ──▶ its host pages are indexed, as far as the store had them
    to be looked up: look ──▶ index (``store_index.py``)

Nothing is asked of a store in its cooldown after failures (``StoreState``), nor of one that has owed an answer for
``STALL_SECONDS``. ``problem`` reports what blocks the store's thread, for ``/health``; serving continues without it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..mem_cache.host_tier import HostTier
from ..messages.base import Message, pack_i32
from ..messages.metrics import Family
from ..messages.tiers import (
    DropPages,
    FetchPages,
    FindPages,
    PagesFetched,
    PagesFound,
    PagesKept,
    PagesStored,
    StoreState,
    TierEvent,
)
from ..runtime.metrics import Metrics, counter, gauge, one_of, read
from .kept_pages import KeptPages, NoKeptPages
from .options import SchedulerOptions
from .store_backlog import NoBacklog, StoreBacklog
from .store_index import LOOK_SECONDS, StoreIndex
from .tier_counts import TierCounts

LEAST_FETCH = 256
"""Minimum tokens of a fetch: fewer are computed sooner than asked for (SGLang's prefetch threshold)."""
LONGEST_WAIT = 10.0
"""Maximum seconds that a request waits, whatever its policy."""
STALL_SECONDS = 10.0
WAIT_BASE, WAIT_PER_KILOTOKEN = 0.25, 0.1
"""Seconds that the policy "timeout" waits: a base, and more per 1,000 tokens."""
LEAST_WAIT = 0.05
"""Minimum seconds that the policy "auto" waits for a fetch that should be sooner: a busy machine is late by as much."""
Worth = Callable[[int], float]
FetchWatcher = Callable[[str], None]
"""Called with the rid of a request when the fetch that it may wait for has ended."""


def as_long_as_any(tokens: int) -> float:
    """Return ``LONGEST_WAIT``, the longest wait in seconds, whatever the number of tokens."""
    return LONGEST_WAIT


class Fetch(NamedTuple):
    """Pages on their way from the store."""

    rid: str
    hashes: list[bytes]
    pages: list[int]
    asked_at: float
    patience: float


class StoreLink:
    """The link to the store; see the module. ``ids`` numbers all messages to the worker."""

    enabled = True

    def __init__(
        self, options: SchedulerOptions, host: HostTier, counts: TierCounts, ids: itertools.count[int], page_bytes: int
    ) -> None:
        self.state = StoreState("closed", "")
        self._host, self.counts, self._ids = host, counts, ids
        self._policy = options.hicache_storage_prefetch_policy
        self.page_size = options.page_size
        self._commands: list[Message] = []
        self._turn_at = 0.0
        self._brought: set[bytes] = set()
        """Pages that the store has brought to the host and that no request has used since."""
        self._fetches: dict[int, Fetch] = {}
        """Fetches under way, in the order of their start."""
        self._ends: list[tuple[float, int]] = []
        """Heap: when a request will have waited long enough for a fetch, and the id of the fetch."""
        self._fetching: dict[str, int] = {}
        self._insistent: set[str] = set()
        self.fetch_watchers: list[FetchWatcher] = []
        self.backlog = StoreBacklog(host, counts, ids, self.tell_store, lambda hashes: self.kept.left(hashes))
        self.kept = KeptPages(self.backlog, self, lambda: next(ids))
        self.index = StoreIndex(page_bytes)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Remove bad pages from the store, from the backlog and from fetches under way."""
        hashes = list(hashes)
        self._disown(set(hashes))
        self.backlog.drop(hashes)
        if hashes:
            self._commands.append(DropPages(b"".join(hashes)))

    def _disown(self, bad: set[bytes]) -> None:
        """Ignore bad pages of fetches under way, and all pages that follow them: their prefix has a bad page."""
        for fetch in self._fetches.values():
            first = next((i for i, page_hash in enumerate(fetch.hashes) if page_hash in bad), None)
            if first is not None:
                del fetch.hashes[first:]

    def tell_store(self, message: Message) -> None:
        """Queue a message for the store; ``take`` returns it in this tick."""
        self._commands.append(message)

    # --- to be read ---

    def prefetch(
        self, rid: str, hashes: list[bytes], now: float, worth: Worth = as_long_as_any, most_wait: float = LONGEST_WAIT
    ) -> None:
        """Order the store to bring pages of a request that has just arrived. ``hashes`` follow, in a row, what is
        cached here.

        Nothing is ordered if the store does not answer, or if there are too few pages or host pages. ``worth`` returns
        for how many seconds a number of tokens is worth waiting for. ``most_wait``: limit in seconds, whatever the
        policy allows.
        """
        if rid in self._fetching or not self._answers(now):
            return
        missing = hashes[: max(0, self._room())]
        if len(missing) * self.page_size < LEAST_FETCH:
            return
        pages = self._host.reserve(len(missing))
        fetch_id = next(self._ids)
        patience = min(most_wait, self._patience_for(rid, len(pages), worth, now))
        missing = missing[: len(pages)]
        self._fetches[fetch_id] = Fetch(rid, missing, pages, now, patience)
        self._fetching[rid] = fetch_id
        if patience:
            heapq.heappush(self._ends, (now + patience, fetch_id))
        self.counts.asked += len(pages)
        packed = pack_i32(np.array(pages, dtype=np.int32))
        self._commands.append(FetchPages(fetch_id, b"".join(missing), packed))

    def _room(self) -> int:
        """Return how many more host pages may be reserved for the store: half of all, less those reserved."""
        return self._host.num_pages // 2 - self._host.reserved_pages

    def _patience_for(self, rid: str, pages: int, worth: Worth, now: float) -> float:
        """Return for how many seconds a request waits for ``pages`` pages.

        ``worth`` returns for how many seconds a number of tokens is worth waiting for, usually the time to compute
        them. By the policy "auto", it waits while the time that is left is less than computing the pages takes. A fetch
        that is overdue is expected to take as long again as it has taken. So it is waited for as long as computing
        takes, and one that would not be sooner is not waited for at all.
        """
        tokens = pages * self.page_size
        if rid in self._insistent:
            return LONGEST_WAIT
        most = min(LONGEST_WAIT, worth(tokens))
        if self._policy == "auto":
            is_sooner = self.fetch_ms(pages, now) < worth(tokens) * 1000
            return max(most, LEAST_WAIT) if is_sooner else 0.0
        limits = {"best_effort": 0.0, "timeout": WAIT_BASE + WAIT_PER_KILOTOKEN * tokens / 1000}
        return min(limits.get(self._policy, LONGEST_WAIT), LONGEST_WAIT)

    def look(self, rid: str, hashes: list[bytes], now: float) -> None:
        """Ask the store how many of these pages of a request it has; ``index`` gets the answer later.

        Nothing is asked if no request would wait for a fetch. No more pages are asked for than host memory has room
        for.
        """
        hashes = hashes[: max(0, self._room())]
        is_worth_it = self._policy != "best_effort" and len(hashes) * self.page_size >= LEAST_FETCH
        if is_worth_it and self._answers(now) and self._silence(now) < LOOK_SECONDS:
            look_id = next(self._ids)
            self.index.begin(look_id, rid, now)
            self._commands.append(FindPages(look_id, b"".join(hashes)))

    def fetch_ms(self, pages: int, now: float) -> float:
        """Return the estimated milliseconds of a fetch of ``pages`` pages, ordered at ``now``.

        A store that has owed an answer for a time may owe it as long again.
        """
        return self.index.ms(pages, now) + self._silence(now) * 1000

    def estimate_fetch(self, rid: str, now: float, worth: Worth) -> tuple[int, float]:
        """Return how many tokens a fetch is expected to bring in time, and for how many milliseconds the request waits.

        The estimate uses the store's last answer about the request's pages. A fetch that would take longer than the
        policy allows brings 0 tokens; the request waits nevertheless, as long as allowed. ``worth`` returns for how
        many seconds a number of tokens is worth waiting for.
        """
        pages = self.index.seen(rid)
        tokens = pages * self.page_size
        if tokens < LEAST_FETCH:
            return 0, 0.0
        needed, patience = self.fetch_ms(pages, now), self._patience_for(rid, pages, worth, now) * 1000
        return (tokens, needed) if needed <= patience else (0, patience)

    def is_fetching(self, rid: str) -> bool:
        """Return whether a fetch for the request is under way."""
        return rid in self._fetching

    def insist(self, rid: str) -> None:
        """Let the request, which is about to be queued, wait ``LONGEST_WAIT`` for the store, whatever the policy."""
        self._insistent.add(rid)

    def must_wait(self, rid: str, now: float) -> bool:
        """Return whether the request is not to be admitted yet, since a fetch may soon bring more of its KV."""
        return now < self.waits_until(rid)

    def waits_until(self, rid: str) -> float:
        """Return when the request stops to wait for its fetch (``time.monotonic()``); -infinity without a fetch."""
        fetch = self._fetches.get(self._fetching.get(rid, 0))
        return fetch.asked_at + fetch.patience if fetch is not None else -math.inf

    def forget(self, rid: str) -> None:
        """Forget a request that has ended or begun. Pages on their way for it are kept for others."""
        self._fetching.pop(rid, None)
        self._insistent.discard(rid)
        self.index.forget(rid)

    def take_brought(self, hashes: list[bytes]) -> set[bytes]:
        """Return those of these pages, which a request is about to use, that the store has brought and no request used
        before.

        Each page is returned once.
        """
        brought = self._brought.intersection(hashes)
        self._brought -= brought
        return brought

    # --- the worker ---

    def take(self, now: float) -> list[Message]:
        """Remove and return all messages for the worker; called once a tick.

        Before that, add the next batch to be written and the orders to keep pages that are due at ``now``.
        """
        self._turn_at = now
        if self._answers(now):
            self.backlog.send_next(now)
        self.kept.advance(now)
        messages, self._commands = self._commands, []
        return messages

    def timeout(self, now: float) -> float | None:
        """Return the seconds until ``take`` or ``must_wait`` changes its result by time alone; None if neither will."""
        # What came due since this tick began has not been handled yet.
        while self._ends and (self._ends[0][0] <= self._turn_at or self._ends[0][1] not in self._fetches):
            heapq.heappop(self._ends)
        ends = [self._ends[0][0]] if self._ends else []
        if (looking := self.index.next_end(self._turn_at)) is not None:
            ends.append(looking)
        if (writing := self.backlog.next_at) is not None and self.state.breaker != "open":
            ends.append(writing)
        if (keeping := self.kept.timeout(now)) is not None:
            ends.append(now + keeping)
        left = [max(0.0, end - now) for end in ends if end > self._turn_at]
        return min(left) if left else None

    def on_event(self, event: TierEvent, now: float) -> None:
        """Pass a report of the worker about the store on to the part that it concerns. Other reports are ignored."""
        if isinstance(event, StoreState):
            self.on_state(event, now)
        elif isinstance(event, PagesStored):
            self.backlog.on_stored(event, now)
        elif isinstance(event, PagesKept):
            self.kept.on_kept(event)
        elif isinstance(event, PagesFetched):
            self.on_fetched(event, now)
        elif isinstance(event, PagesFound):
            self.index.on_found(event)

    def on_state(self, state: StoreState, now: float) -> None:
        """Record the worker's report on the store. If its circuit breaker has closed, writing goes on at once."""
        if self.state.breaker != "closed" and state.breaker == "closed":
            self.backlog.resume(now)
        self.state = state

    def on_fetched(self, event: PagesFetched, now: float) -> None:
        """Index the pages that a fetch has brought to host memory, and free the host pages that it did not fill.

        The request need not wait any longer. The speed of fetches is learned.
        """
        fetch = self._fetches.pop(event.id)
        self.index.learn(event.count, now - fetch.asked_at, now)
        came = fetch.hashes[: event.count]
        self._host.settle(fetch.pages, came)
        self.backlog.read(came, fetch.hashes[event.count :])
        self._brought.update(came)
        self.counts.fetched += event.count
        self.counts.fetch_seconds += event.seconds
        if self._fetching.get(fetch.rid) == event.id:
            del self._fetching[fetch.rid]
            for ended in self.fetch_watchers:
                ended(fetch.rid)
        # Pages that the host no longer has are dropped only now and then.
        if len(self._brought) > 2 * self._host.num_pages:
            self._brought = {page_hash for page_hash in self._brought if page_hash in self._host}

    # --- status ---

    def _silence(self, now: float) -> float:
        """Return for how many seconds the store has owed its oldest answer; 0.0 if it owes none."""
        oldest = (next(iter(self._fetches.values()), None), self.backlog.oldest, self.index.oldest)
        asked = [one.asked_at for one in oldest if one is not None]
        return now - min(asked) if asked else 0.0

    def _answers(self, now: float) -> bool:
        return self.state.breaker != "open" and self._silence(now) < STALL_SECONDS

    def problem(self, now: float) -> str:
        """Return the problem that an operator should look at, "" for none."""
        silence = self._silence(now)
        if silence >= STALL_SECONDS:
            return f"the KV store has not answered for {silence:.0f} s; serving continues without it"
        if self.state.breaker == "closed":
            return self.backlog.problem
        return f"the KV store is paused after failures; serving continues without it: {self.state.reason}"

    @property
    def fetching(self) -> int:
        """Number of fetches under way."""
        return len(self._fetches)

    def metrics(self) -> list[Family]:
        """Return the metrics of the store."""
        return read(METRICS, self)


class NoStore:
    """The ``StoreLink`` of an instance without a store."""

    enabled = False
    fetching = 0
    state = StoreState("closed", "")

    def __init__(self) -> None:
        self.backlog = NoBacklog()
        self.kept = NoKeptPages()
        self.index = StoreIndex(1)
        self.fetch_watchers: list[FetchWatcher] = []

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Do nothing: there is no store that could have the pages."""

    def prefetch(
        self, rid: str, hashes: list[bytes], now: float, worth: Worth = as_long_as_any, most_wait: float = LONGEST_WAIT
    ) -> None:
        """Do nothing: there is no store to fetch from."""

    def look(self, rid: str, hashes: list[bytes], now: float) -> None:
        """Do nothing: there is no store to ask."""

    def fetch_ms(self, pages: int, now: float) -> float:
        """Return infinity: no page ever comes from a store."""
        return math.inf

    def estimate_fetch(self, rid: str, now: float, worth: Worth) -> tuple[int, float]:
        """Return (0, 0.0): no tokens come from a store, and no request waits for it."""
        return 0, 0.0

    def is_fetching(self, rid: str) -> bool:
        """Return False: nothing is fetched."""
        return False

    def insist(self, rid: str) -> None:
        """Do nothing: no request waits for a store."""

    def must_wait(self, rid: str, now: float) -> bool:
        """Return False: no request waits for a store."""
        return False

    def waits_until(self, rid: str) -> float:
        """Return -infinity: no request waits for a store."""
        return -math.inf

    def forget(self, rid: str) -> None:
        """Do nothing: no request is known here."""

    def take_brought(self, hashes: list[bytes]) -> set[bytes]:
        """Return an empty set: no page comes from a store."""
        return set()

    def take(self, now: float) -> list[Message]:
        """Return []: the worker has no store to send messages to."""
        return []

    def timeout(self, now: float) -> float | None:
        """Return None: nothing here changes by time."""
        return None

    def on_event(self, event: TierEvent, now: float) -> None:
        """Raise ``AssertionError``: the worker has no store."""
        raise AssertionError(f"the worker sent {event}, and the instance has no store")

    def problem(self, now: float) -> str:
        """Return "": without a store there is no problem with it."""
        return ""

    def metrics(self) -> list[Family]:
        """Return []: an instance without a store has no metrics of it."""
        return []


Store = StoreLink | NoStore


BREAKER_STATES = ("closed", "open", "half-open")
METRICS: Metrics[StoreLink] = (
    gauge(
        "pdserve_kv_store_state",
        "1 for the state that the store's breaker is in: closed (asked), open (left alone), half-open (tried).",
        lambda s: one_of(s.state.breaker, BREAKER_STATES),
        "state",
        note="`open`: it is left alone because it fails; `half-open`: it is tried again.",
    ),
    counter(
        "pdserve_kv_store_asked_tokens_total",
        "KV that the store was asked for.",
        lambda s: s.counts.asked * s.page_size,
    ),
    counter(
        "pdserve_kv_store_skipped_tokens_total",
        "KV that came faster than the store took it.",
        lambda s: s.counts.skipped * s.page_size,
    ),
    counter(
        "pdserve_kv_store_bad_pages_total",
        "Pages of the store found damaged or another prompt's, and dropped.",
        lambda s: s.state.bad_pages,
    ),
    counter(
        "pdserve_kv_store_evicted_pages_total",
        "Pages that the store dropped to make room.",
        lambda s: s.state.evicted_pages,
    ),
    gauge(
        "pdserve_kv_store_tokens",
        "KV in the store, as far as this instance knows.",
        lambda s: s.state.pages * s.page_size if s.state.pages >= 0 else None,
        note="Absent where the store can't tell.",
    ),
    gauge(
        "pdserve_kv_store_bytes",
        "KV in the store in bytes, as far as this instance knows.",
        lambda s: s.state.nbytes if s.state.nbytes >= 0 else None,
        note="Absent where the store can't tell.",
    ),
)
