"""Fetching a prompt's pages from the decode's own store before a prefill is asked for the rest.

A room does this in PREALLOCATED, before it is decided which instance computes the prompt::

    NEW → LOOKING (what does the store have?) → FETCHING → OVER (what came is loaded, and need not be computed or sent)
                        └───────────────────────────────────▶ OVER (it would not be sooner)

The store is probed while the prefill is asked for its forecast. Two times to the first token and its KV are compared
(``placement_policy.py``): without the store's pages, and with them after they have arrived. A fetch may take
``PATIENCE`` times as long as it can take to be a gain, but never longer than ``--hicache-storage-prefetch-policy``
allows. After that the room continues as if the store had not been asked. Pages that come too late stay in host memory
for other requests.

No peer writes to the room's pages yet: the prefill gets only the pages after the fetched ones. A client that leaves or
a prefill that dies ends the room as usual. A fetch under way belongs to the host tier (``scheduler/store_link.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...messages.outputs import HeldTokens
from ...runtime.metrics import Metrics, counter
from ...scheduler.scheduler import Scheduler
from ...scheduler.tier_counts import NOTHING_BEYOND
from .kv_receiver import KVReceiver, StoreStage
from .placement_policy import PlacementPolicy, Prospects

PATIENCE = 1.5
"""Time limit of a fetch, as a multiple of the longest time that is a gain. A slightly late fetch beats a new start."""


def patience_ms(missing: int, pages: int, page_size: int, fetch_ms: float, prospects: Prospects) -> float:
    """Return how long to wait for ``pages`` pages from the store, in milliseconds; 0 if fetching them is no gain.

    ``missing``: tokens of the prompt that are not cached here. ``fetch_ms``: estimated time of the fetch.
    """
    left = missing - pages * page_size
    gain = prospects.sooner(missing, -(-missing // page_size)) - prospects.sooner(left, -(-left // page_size))
    return PATIENCE * gain if pages and fetch_ms < gain else 0.0


@dataclass
class StoreFirstCounts:
    """Prompts for which a decode read its own store before it asked a prefill for the remaining pages."""

    came: int = 0
    """Prompts with pages from the store."""
    late: int = 0
    """Prompts for which the store took too long."""
    lost: int = 0
    """Prompts for which no page came, because the store had lost them or failed."""
    tokens: int = 0
    """Tokens that came from the store."""


class StoreFirst:
    """Owner of the store stage of all rooms."""

    def __init__(self, scheduler: Scheduler, policy: PlacementPolicy) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self.counts = StoreFirstCounts()

    def look(self, receiver: KVReceiver, now: float) -> None:
        """Ask the store what it has of the rest of a prompt, if that may be a gain. The room must have its memory.

        ``holds_up`` then tells whether the room waits for the answer.
        """
        tiers, req = self._scheduler.tiers, receiver.req
        receiver.store = StoreStage.OVER
        if not tiers.store.enabled:
            return
        if receiver.decided and not self._patience(receiver, self._reusable(receiver), now):
            return
        tiers.look(req, req.computed, now)
        if tiers.store.index.is_looking(req.rid, now):
            receiver.store = StoreStage.LOOKING

    def holds_up(self, receiver: KVReceiver, now: float) -> bool:
        """Advance the room's fetch from the store, and return whether the room still waits for the store.

        When it returns False, pages that came are loaded into the request's memory. The prefill's forecast must be
        known, if it was asked for.
        """
        if receiver.store is StoreStage.LOOKING:
            self._after_look(receiver, now)
        elif receiver.store is StoreStage.FETCHING:
            self._after_fetch(receiver, now)
        return receiver.store is not StoreStage.OVER

    def start_over(self, receiver: KVReceiver) -> None:
        """Forget the question or fetch of a room that has lost its memory. The store is asked anew when it has memory
        again.
        """
        if receiver.store is not StoreStage.OVER:
            self._over(receiver)
            receiver.store = StoreStage.NEW

    def held(self, receiver: KVReceiver) -> HeldTokens | None:
        """Return how many prompt tokens this decode has itself, in pool, host memory and store; None without tiers."""
        if not self._scheduler.tiers.enabled:
            return None
        beyond = receiver.req.cached_beyond or NOTHING_BEYOND
        return HeldTokens(receiver.prefix_len - beyond.host - beyond.store, beyond.host, beyond.store)

    def _after_look(self, receiver: KVReceiver, now: float) -> None:
        tiers, req = self._scheduler.tiers, receiver.req
        if tiers.store.index.is_looking(req.rid, now):
            if not self._patience(receiver, self._reusable(receiver), now):
                self._over(receiver)  # even the most that the store may have is no gain
            return
        pages = tiers.store.index.seen(req.rid)
        seconds = self._patience(receiver, pages, now) / 1000
        if seconds and tiers.fetch(req, req.computed, pages, seconds, now):
            receiver.store = StoreStage.FETCHING
        else:
            self._over(receiver)

    def _after_fetch(self, receiver: KVReceiver, now: float) -> None:
        tiers, req = self._scheduler.tiers, receiver.req
        if tiers.store.must_wait(req.rid, now):
            return
        is_late = tiers.store.is_fetching(req.rid)
        before = req.computed
        self._scheduler.memory.load(req, tiers.find(req, before, req.longest_reusable_prefix), more=True)
        receiver.prefix_len, came = req.computed, req.computed - before
        self._scheduler.planner.hit_tokens += came
        self.counts.tokens += came
        if came:
            self.counts.came += 1
        elif is_late:
            self.counts.late += 1
        else:
            self.counts.lost += 1
        self._over(receiver)

    def _over(self, receiver: KVReceiver) -> None:
        receiver.store = StoreStage.OVER
        self._scheduler.tiers.store.forget(receiver.req.rid)

    def _reusable(self, receiver: KVReceiver) -> int:
        """Return the maximum number of further pages of the prompt that may come from a store.

        That is the whole pages of the longest prefix that may be reused, less those in the pool already.
        """
        req, page_size = receiver.req, self._scheduler.memory.pool.page_size
        return max(0, req.longest_reusable_prefix // page_size - req.computed // page_size)

    def _patience(self, receiver: KVReceiver, pages: int, now: float) -> float:
        req, tiers = receiver.req, self._scheduler.tiers
        missing, page_size = req.prompt_len - req.computed, self._scheduler.memory.pool.page_size
        prospects = self._policy.prospects(req, receiver.peer.epoch, receiver.there_ms, now)
        return patience_ms(missing, pages, page_size, tiers.store.fetch_ms(pages, now), prospects)


METRICS: Metrics[StoreFirstCounts] = (
    counter(
        "pdserve_handover_fetches_total",
        "Prompts of which this decode asked its own store before a prefill, by what became of it.",
        lambda counts: {"came": counts.came, "late": counts.late, "lost": counts.lost},
        "outcome",
        note="Outcomes: pages `came`, came too `late` to be waited for, or were `lost`, not there or not right "
        "([tiers.md](tiers.md#prefill-and-decode-over-one-store)).",
    ),
    counter(
        "pdserve_handover_fetched_tokens_total",
        "Prompt tokens with KV from this decode's own store instead of a prefill.",
        lambda counts: counts.tokens,
    ),
)
