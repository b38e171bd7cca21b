"""What the scheduler counts, on its way to the HTTP process, which shows it on ``/metrics``.

Plain numbers only: the scheduler's loop knows nothing of Prometheus. Counts are since the start and never fall.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from .base import Message


class Histogram(msgspec.Struct, forbid_unknown_fields=True):
    """Values counted by size, cheap enough for every token (0.3 µs, where the client library's own takes 2).

    ``counts[i]`` is of values above ``bounds[i - 1]`` and up to ``bounds[i]``; the last one is of all beyond.
    """

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0
    """Sum of all values."""

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)
        elif len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.counts)} counts for {len(self.bounds)} bounds")

    def observe(self, value: float, times: int = 1) -> None:
        """``value`` was seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.bounds, self.counts.copy(), self.total)


class PoolUsage(msgspec.Struct, forbid_unknown_fields=True):
    """Tokens of the KV pool: ``cached`` ones can be evicted, ``in_use`` are requests' own. They add up to ``total``."""

    total: int
    free: int
    cached: int
    in_use: int


class PromiseCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Steps that owed their readers an end in time (``--itl-budget-ms``), and those of them that came late."""

    steps: int
    late: int


class DirectionCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Hand-overs of one direction. ``seconds``: spent pushing KV, 0 for who receives it.

    ``recomputed``: those whose client had its first token when they failed, so that the rest was computed here.
    """

    open: int
    done: int
    failed: int
    nbytes: int
    seconds: float = 0.0
    recomputed: int = 0


class MoveCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Running requests that went to other instances, or came from there; ``paused_seconds``: how long those that went
    stood still, added up. ``returned``, ``kept``: KV of finished requests that was given back, or taken.
    """

    out: int = 0
    out_failed: int = 0
    in_: int = 0
    in_failed: int = 0
    paused_seconds: float = 0.0
    returned: int = 0
    kept: int = 0


class PlaceCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts that might have been computed elsewhere, and were not. ``predicted_seconds`` and ``actual_seconds``: from
    the decision to the first token, of those whose first token came.
    """

    prompts: int = 0
    predicted_seconds: float = 0.0
    actual_seconds: float = 0.0


class ChoiceCounts(msgspec.Struct, forbid_unknown_fields=True):
    """What a decode decided (``--disaggregation-threshold``): to compute prompts itself, or to have them computed."""

    here: PlaceCounts = msgspec.field(default_factory=PlaceCounts)
    there: PlaceCounts = msgspec.field(default_factory=PlaceCounts)


class StoreFirstCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts of which a decode fetched pages from its own store before it asked a prefill for the rest: some ``came``,
    they were too ``late``, or they were ``lost``. ``tokens``: that came.
    """

    came: int = 0
    late: int = 0
    lost: int = 0
    tokens: int = 0


class HandoverCounts(msgspec.Struct, forbid_unknown_fields=True):
    """Hand-overs of an instance. ``peers``: instances that are connected now. ``refused``: frames and connections that
    strangers were denied.
    """

    sent: DirectionCounts
    received: DirectionCounts
    peers: int
    refused: int
    moves: MoveCounts = msgspec.field(default_factory=MoveCounts)
    choices: ChoiceCounts = msgspec.field(default_factory=ChoiceCounts)
    store_first: StoreFirstCounts = msgspec.field(default_factory=StoreFirstCounts)


class StoreMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """A store of KV pages: ``breaker`` as in ``StoreState``; what it holds in bytes and tokens, None: it can't say."""

    breaker: str
    tokens: int | None
    nbytes: int | None
    bad_pages: int
    evicted_pages: int


class TierMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """KV beyond the pool, in tokens: what the host holds, and what was saved there, loaded from there, written to the
    store and read from it since the start. ``asked``: of the store; ``skipped``: came faster than it takes them.

    ``hit_host`` and ``hit_store``: those of the ``hit_tokens`` that came from there. Seconds are those of the worker,
    and of the store's thread beside it.
    """

    host_total: int
    host_used: int
    saved: int
    loaded: int
    stored: int
    fetched: int
    asked: int
    skipped: int
    hit_host: int
    hit_store: int
    copy_seconds: float
    fetch_seconds: float
    store_seconds: float
    store: StoreMetrics | None = None


class KVDebugMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """With ``--kv-debug``, by place: pages that were compared, and hashes of a layer's keys or values that differed."""

    compared: dict[str, int]
    mismatches: dict[str, int]


class SchedulerMetrics(Message):
    """Scheduler → detokenizer → HTTP, behind the tokens that it counts; twice a second at most while requests run.

    ``states``: living requests by where they stand. Of prompts, ``prompt_tokens`` were computed here and
    ``cached_tokens`` found here by the instance that computed the rest: each token once, on one instance of a pair.
    ``recomputed_tokens``: tokens that were computed again after a retraction. ``asked_tokens`` and ``hit_tokens``: what
    the prefix cache was asked for, and had. ``decode_tokens``: those that steps sampled beside prompts, wanted or not.
    ``preemptions``: those of the ``retractions`` that were for the sake of a higher priority. ``followers``: requests
    that waited for the prompt of another one that begins alike. ``compiled_kernels``: see ``StepResult``.
    """

    draining: bool
    role: str
    states: dict[str, int]
    pool: PoolUsage
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    decode_tokens: int
    asked_tokens: int
    hit_tokens: int
    retractions: int
    preemptions: int
    followers: int
    step_seconds: Histogram
    cost_model_error: float | None
    """Half of the last steps were off by less, relative to what was foreseen; None before the first step."""
    promises: PromiseCounts | None
    handovers: HandoverCounts | None
    tiers: TierMetrics | None
    """None where there are none behind the pool."""
    compiled_kernels: int = 0
    pressure: str = "none"
    """On KV memory (``scheduler/pressure.py``)."""
    released: list[str] = []
    """What memory was given back (``MemoryTag``)."""
    kv_debug: KVDebugMetrics | None = None
    """None without it."""
