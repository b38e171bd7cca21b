"""Compute shared prefixes once: a waiting request is parked while a running one prefills the prefix they have in
common.

What a request computes is cached as soon as its step is planned. But two requests that come together would both get
memory, and compute the same tokens side by side. So a request is parked if a prompt in progress has at least
``LEAST_SHARED`` uncached tokens ahead that both need. It is parked until these are cached.

The wait is bounded. A parked request would have computed the same tokens itself, so it loses nothing as long as the
first one advances. It is tried again when the first has ended, was retracted, or has not advanced for
``MOST_STANDSTILL`` plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..runtime.metrics import Metrics, counter
from .policies.prefix_index import common_tokens
from .req import Req, ReqState

LEAST_SHARED = 128
"""Minimum shared tokens: fewer are computed sooner than the next step begins."""
MOST_STANDSTILL = 16
MOST_A_TURN = 64
"""Maximum requests parked in one tick: each is compared with the prompts that have started."""


@dataclass(slots=True)
class _Leader:
    """Progress of a request that computes what others wait for.

    ``followers``: heap of (tokens that both begin with, number, request).
    """

    followers: list[tuple[int, int, Req]] = field(default_factory=list)
    computed: int = 0
    standstill: int = 0


class SharedPrompts:
    """Owner of the requests parked for a shared prefix. ``enabled`` is False if nothing is cached."""

    def __init__(self, page_size: int, *, enabled: bool) -> None:
        self._page = page_size
        self._enabled = enabled
        self._leaders: dict[Req, _Leader] = {}
        self._count = 0
        self.set_aside = 0
        """Number of requests parked since the start."""

    def follows(self, req: Req, cached: int, begun: Iterable[Req]) -> bool:
        """Return whether ``req`` is to be parked because one of ``begun`` computes a prefix that both have in common.

        ``cached``: tokens of ``req`` in the cache. If it is to be parked, it is recorded, and ``ready`` returns it
        later; the caller parks it.
        """
        if not self._enabled or req.longest_reusable_prefix - cached < LEAST_SHARED:
            return False
        for first in begun:
            common = self._common(req, first)
            if first is not req and common - max(cached, _shared(first)) >= LEAST_SHARED:
                leader = self._leaders.setdefault(first, _Leader(computed=first.computed))
                if leader.standstill >= MOST_STANDSTILL:
                    continue  # no request waits for it until it advances
                self._count += 1
                self.set_aside += 1
                heapq.heappush(leader.followers, (common, self._count, req))
                return True
        return False

    def ready(self) -> list[Req]:
        """Return the parked requests that need not wait any longer, and drop their records. Called once a plan.

        Such a one finds nearly all of the common prefix cached. Or the request that computes it has ended its prefill,
        or made no progress for ``MOST_STANDSTILL`` calls.
        """
        found: list[Req] = []
        for first, leader in list(self._leaders.items()):
            leader.standstill = 0 if first.computed > leader.computed else leader.standstill + 1
            leader.computed = first.computed
            over = first.state is not ReqState.PREFILLING or leader.standstill >= MOST_STANDSTILL
            there = _shared(first)
            while leader.followers and (over or leader.followers[0][0] - there < LEAST_SHARED):
                found.append(heapq.heappop(leader.followers)[2])
            # A leader that stands still is remembered: released followers would only be parked for it again.
            if not leader.followers and (first.state is not ReqState.PREFILLING or not leader.standstill):
                del self._leaders[first]
        return found

    def _common(self, req: Req, first: Req) -> int:
        """Return how many first tokens, in whole pages, both have in common and ``req`` may take from the cache."""
        if req.msg.extra_key != first.msg.extra_key or first.hold is None or not first.hold.verified:
            return 0
        length = min(req.longest_reusable_prefix, first.known_len)
        return common_tokens(req.token_ids[:length], first.token_ids[:length]) // self._page * self._page


def _shared(first: Req) -> int:
    """Return how many tokens of the prompt of ``first`` other requests can find in the cache."""
    return first.hold.cached_len if first.hold is not None else 0


METRICS: Metrics[SharedPrompts] = (
    counter(
        "pdserve_shared_prompts_total",
        "Requests that waited for the prompt of another one that begins alike.",
        lambda s: s.set_aside,
    ),
)
