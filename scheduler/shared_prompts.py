"""Prompts that begin alike are computed once: who waits lets the one go ahead that computes what both begin with.

What a request computes is cached as soon as its step is planned. But of two that come together, both would be given
memory, and compute the same tokens side by side. So where one is in the middle of its prompt, and has tokens before it
that another one also needs and nobody has cached, at least ``LEAST_SHARED``, the other is set aside until these are
there.

The wait is bounded: it would have computed the same tokens itself, so it loses nothing as long as the first moves on;
it is tried again when the first is over, or was retracted, or has not moved on for ``MOST_STANDSTILL`` plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from .policies.prefix_index import common_tokens
from .req import Req, ReqState

LEAST_SHARED = 128
"""Tokens: fewer are computed sooner than the next step begins."""
MOST_STANDSTILL = 16
MOST_A_TURN = 64
"""So many are set aside in one turn; each is compared with the prompts that are begun."""


@dataclass(slots=True)
class _Leader:
    """One that computes what others wait for. ``followers``: (tokens that both begin with, number, who)."""

    followers: list[tuple[int, int, Req]] = field(default_factory=list)
    computed: int = 0
    standstill: int = 0


class SharedPrompts:
    """Owner of those that are set aside. ``enabled`` False where nothing is cached."""

    def __init__(self, page_size: int, *, enabled: bool) -> None:
        self._page = page_size
        self._enabled = enabled
        self._leaders: dict[Req, _Leader] = {}
        self._count = 0
        self.set_aside = 0
        """Since the start."""

    def follows(self, req: Req, cached: int, begun: Iterable[Req]) -> bool:
        """Whether ``req``, of which so many tokens are cached, is set aside for one of ``begun``."""
        if not self._enabled or req.longest_reusable_prefix - cached < LEAST_SHARED:
            return False
        for first in begun:
            common = self._common(req, first)
            if first is not req and common - max(cached, _shared(first)) >= LEAST_SHARED:
                leader = self._leaders.setdefault(first, _Leader(computed=first.computed))
                if leader.standstill >= MOST_STANDSTILL:
                    continue  # nobody waits for it until it moves on
                self._count += 1
                self.set_aside += 1
                heapq.heappush(leader.followers, (common, self._count, req))
                return True
        return False

    def ready(self) -> list[Req]:
        """Those that need wait no longer. Once a plan."""
        found: list[Req] = []
        for first, leader in list(self._leaders.items()):
            leader.standstill = 0 if first.computed > leader.computed else leader.standstill + 1
            leader.computed = first.computed
            over = first.state is not ReqState.PREFILLING or leader.standstill >= MOST_STANDSTILL
            there = _shared(first)
            while leader.followers and (over or leader.followers[0][0] - there < LEAST_SHARED):
                found.append(heapq.heappop(leader.followers)[2])
            # One that stands still is remembered: who was given back would only be set aside for it again.
            if not leader.followers and (first.state is not ReqState.PREFILLING or not leader.standstill):
                del self._leaders[first]
        return found

    def _common(self, req: Req, first: Req) -> int:
        """Whole pages that both begin with and ``req`` may take from the cache."""
        if req.msg.extra_key != first.msg.extra_key or first.hold is None or not first.hold.verified:
            return 0
        length = min(req.longest_reusable_prefix, first.known_len)
        return common_tokens(req.token_ids[:length], first.token_ids[:length]) // self._page * self._page


def _shared(first: Req) -> int:
    """What of a request's own prompt others find in the cache."""
    return first.hold.cached_len if first.hold is not None else 0
