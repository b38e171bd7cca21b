"""A decode's own store: whether to fetch pages of a prompt from it before a prefill is asked for the rest.

A room goes through this while it is PREALLOCATED, before it is decided who computes the prompt::

    NEW → LOOKING (what does the store have?) → FETCHING → OVER (what came is loaded, and need not be computed or sent)
                        └───────────────────────────────────▶ OVER (it would not be sooner)

The look goes out with the question for the prefill's forecast. What is compared is the time to the first token, with
the KV behind it (``choice.py``): as it is, and as it would be with the store's pages, from when they are here. A store
that turns out to be slow is waited for half as long again as it may take to be a gain, and never longer than
``--hicache-storage-prefetch-policy`` allows. Then the room goes on as if it had not been asked; what comes too late is
host memory's, for others.

Nobody else writes to the room's pages yet: the prefill is let in to those behind what came. A client that leaves, and a
prefill that dies, end the room as ever; what is under way belongs to the host's tier (``scheduler/store_link.py``).
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
"""Times as long as a fetch may take to be a gain: one that is a little late costs less than to begin anew without."""


def patience_ms(missing: int, pages: int, page_size: int, fetch_ms: float, prospects: Prospects) -> float:
    """How long to wait for ``pages`` from the store, of a prompt of which ``missing`` tokens are not here; 0: not at
    all. ``fetch_ms``: how long they take, as it is foreseen.
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
    """See the module."""

    def __init__(self, scheduler: Scheduler, choice: PlacementPolicy) -> None:
        self._scheduler = scheduler
        self._choice = choice
        self.counts = StoreFirstCounts()

    def look(self, receiver: KVReceiver, now: float) -> None:
        """The room has its memory: see what the store has of the rest, where that may be of use."""
        tiers, req = self._scheduler.tiers, receiver.req
        receiver.store = StoreStage.OVER
        if tiers is None or tiers.store is None or receiver.newcomer is not None:
            return
        if receiver.decided and not self._patience(receiver, self._reusable(receiver), now):
            return
        tiers.look(req, req.computed, now)
        if tiers.store.sight.is_looking(req.rid, now):
            receiver.store = StoreStage.LOOKING

    def holds_up(self, receiver: KVReceiver, now: float) -> bool:
        """Whether the room waits for the store yet. What came is the request's when it no longer does. The prefill's
        forecast is known, where it was asked for.
        """
        if receiver.store is StoreStage.LOOKING:
            self._after_look(receiver, now)
        elif receiver.store is StoreStage.FETCHING:
            self._after_fetch(receiver, now)
        return receiver.store is not StoreStage.OVER

    def start_over(self, receiver: KVReceiver) -> None:
        """Forget a look or fetch that is under way: the room has lost its memory, and is looked up when it has some."""
        if receiver.store is not StoreStage.OVER:
            self._over(receiver)
            receiver.store = StoreStage.NEW

    def held(self, receiver: KVReceiver) -> HeldTokens | None:
        """What the decode has itself of a prompt whose KV it asks for; None without tiers."""
        if self._scheduler.tiers is None:
            return None
        beyond = receiver.req.cached_beyond or NOTHING_BEYOND
        return HeldTokens(receiver.prefix_len - beyond.host - beyond.store, beyond.host, beyond.store)

    def _after_look(self, receiver: KVReceiver, now: float) -> None:
        tiers, req = self._scheduler.tiers, receiver.req
        assert tiers is not None
        assert tiers.store is not None
        if tiers.store.sight.is_looking(req.rid, now):
            if not self._patience(receiver, self._reusable(receiver), now):
                self._over(receiver)  # whatever it has
            return
        pages = tiers.store.sight.seen(req.rid)
        seconds = self._patience(receiver, pages, now) / 1000
        if seconds and tiers.fetch(req, req.computed, pages, seconds, now):
            receiver.store = StoreStage.FETCHING
        else:
            self._over(receiver)

    def _after_fetch(self, receiver: KVReceiver, now: float) -> None:
        tiers, req = self._scheduler.tiers, receiver.req
        assert tiers is not None
        assert tiers.store is not None
        if tiers.must_wait(req, now):
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
        assert self._scheduler.tiers is not None
        self._scheduler.tiers.forget(receiver.req.rid)

    def _reusable(self, receiver: KVReceiver) -> int:
        """Pages that may come from a store at most."""
        req, page_size = receiver.req, self._scheduler.memory.page_size
        return max(0, req.longest_reusable_prefix // page_size - req.computed // page_size)

    def _patience(self, receiver: KVReceiver, pages: int, now: float) -> float:
        req, tiers = receiver.req, self._scheduler.tiers
        assert tiers is not None
        assert tiers.store is not None
        missing, page_size = req.prompt_len - req.computed, self._scheduler.memory.page_size
        prospects = self._choice.prospects(req, receiver.peer.epoch, receiver.there_ms, now)
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
