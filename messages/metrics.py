"""Counts of the scheduler, sent to the HTTP process for ``/metrics``.

They are plain numbers: the scheduler's loop does not depend on Prometheus. Counts start at 0 with the process and never
fall.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from .base import Message


class Histogram(msgspec.Struct, forbid_unknown_fields=True):
    """Values counted by size, cheap enough for every token: 0.3 µs, where the client library's own takes 2 µs."""

    bounds: tuple[float, ...]
    counts: list[int] = []
    """Count ``i`` is of values above ``bounds[i - 1]`` and up to ``bounds[i]``; the last one, of all larger values."""
    total: float = 0.0
    """Sum of all values."""

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        elif len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.counts)} counts for {len(self.bounds)} bounds")

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """Return a copy."""
        return Histogram(self.bounds, self.counts.copy(), self.total)


class PoolUsage(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens of the KV pool. The parts add up to ``total``."""

    total: int
    free: int
    cached: int
    """Tokens that only the prefix cache uses and that can be evicted."""
    in_use: int
    """Tokens that requests use."""


class PromiseCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Steps with a time limit (``--itl-budget-ms``)."""

    steps: int
    late: int
    """Steps that took longer than their limit."""


class DirectionCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Hand-overs of one direction."""

    open: int
    done: int
    failed: int
    nbytes: int
    seconds: float = 0.0
    """Time spent pushing KV; 0 on the receiving side."""
    recomputed: int = 0
    """Hand-overs that failed after the first token was sent to the client, so that the prompt was computed here."""


class MoveCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Migrations of running requests to and from other instances, and KV returns of finished ones."""

    out: int = 0
    out_failed: int = 0
    in_: int = 0
    in_failed: int = 0
    paused_seconds: float = 0.0
    """Sum of the times in which migrating requests made no progress."""
    returned: int = 0
    """Finished requests with KV sent back to their prefill."""
    kept: int = 0
    """Finished requests of decodes with KV taken back here."""


class PlaceCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts with a choice of instance, of one outcome of that choice. Times run from the decision to the first token,
    and count only prompts with a first token.
    """

    prompts: int = 0
    predicted_seconds: float = 0.0
    actual_seconds: float = 0.0


class ChoiceCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Decisions of a decode on where to compute prompts (``--disaggregation-threshold``)."""

    here: PlaceCounts = msgspec.field(default_factory=PlaceCounts)
    """Prompts that the decode computes itself."""
    there: PlaceCounts = msgspec.field(default_factory=PlaceCounts)
    """Prompts that a prefill computes."""


class StoreFirstCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts for which a decode read its own store before it asked a prefill for the remaining pages."""

    came: int = 0
    """Prompts with pages from the store."""
    late: int = 0
    """Prompts for which the store took too long."""
    lost: int = 0
    """Prompts for which no page came, because the store had lost them or failed."""
    tokens: int = 0
    """Tokens that came from the store."""


class HandoverCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Hand-overs of an instance."""

    sent: DirectionCounts
    received: DirectionCounts
    peers: int
    """Instances that are connected now."""
    refused: int
    """Frames and connections of unknown senders that were refused."""
    moves: MoveCounts = msgspec.field(default_factory=MoveCounts)
    choices: ChoiceCounts = msgspec.field(default_factory=ChoiceCounts)
    store_first: StoreFirstCounts = msgspec.field(default_factory=StoreFirstCounts)


class StoreMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """A store of KV pages."""

    breaker: str
    """State of its circuit breaker, as in ``StoreState``."""
    tokens: int | None
    """Stored tokens; None if the store cannot count them."""
    nbytes: int | None
    """Stored bytes; None if the store cannot count them."""
    bad_pages: int
    evicted_pages: int


class TierMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """KV in host memory and in the store, counted in tokens since the start."""

    host_total: int
    """Capacity of the host tier."""
    host_used: int
    """Used part of that capacity."""
    saved: int
    """Tokens copied from the pool to the host."""
    loaded: int
    """Tokens copied from the host to the pool."""
    stored: int
    """Tokens written to the store."""
    fetched: int
    """Tokens read from the store."""
    asked: int
    """Tokens that the store was asked for."""
    skipped: int
    """Tokens that were not stored because they came faster than the store takes them."""
    hit_host: int
    """Part of ``SchedulerMetrics.hit_tokens`` that came from the host."""
    hit_store: int
    """Part of ``SchedulerMetrics.hit_tokens`` that came from the store."""
    copy_seconds: float
    """Time that the worker spent on copies."""
    fetch_seconds: float
    """Time that the store's thread spent reading."""
    store_seconds: float
    """Time that the store's thread spent writing."""
    store: StoreMetrics | None = None


class KVDebugMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """Comparisons of ``--kv-debug``, by the stage at which pages were compared."""

    compared: dict[str, int]
    """Pages that were compared."""
    mismatches: dict[str, int]
    """Hashes of a layer's keys or values that differed."""


class SchedulerMetrics(Message):
    """Scheduler → detokenizer → HTTP: all counts, after the tokens that they count. Sent at most twice a second while
    requests run.
    """

    draining: bool
    role: str
    states: dict[str, int]
    """Live requests by state."""
    pool: PoolUsage
    prompt_tokens: int
    """Prompt tokens computed here. Each token counts once, on one instance of a pair."""
    cached_tokens: int
    """Prompt tokens that were in the cache of the instance that computed the remaining ones; counted there."""
    recomputed_tokens: int
    """Tokens that were computed again after a retraction."""
    decode_tokens: int
    """Tokens that decode steps sampled, discarded ones included."""
    asked_tokens: int
    """Tokens that were looked up in the prefix cache."""
    hit_tokens: int
    """Tokens that the prefix cache had."""
    retractions: int
    preemptions: int
    """Retractions in favour of a request of higher priority."""
    followers: int
    """Requests that waited for another request's prompt, because both prompts begin with the same tokens."""
    step_seconds: Histogram
    cost_model_error: float | None
    """Median error of the last steps' time estimates, relative to the estimate; None before the first step."""
    promises: PromiseCounts | None
    handovers: HandoverCounts | None
    tiers: TierMetrics | None
    """None without a host tier or store."""
    compiled_kernels: int = 0
    """GPU kernels compiled while serving; see ``StepResult``."""
    pressure: str = "none"
    """Pressure on KV memory (``scheduler/pressure.py``)."""
    released: list[str] = []
    """Kinds of memory that are released now (``MemoryTag``)."""
    kv_debug: KVDebugMetrics | None = None
    """None without ``--kv-debug``."""
