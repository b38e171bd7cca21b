"""Who gives way when those that run need more memory than there is: the one that costs least for what it gives.

What it costs is the tokens to compute again; what it gives is the pages that nobody shares with it. Prefixes that
others use stay where they are, so a request that shares most of its prompt gives little, and costs little. The one that
came first never gives way, so that some request always comes to its end.

Whoever keeps the KV of a retracted request elsewhere (a second tier) implements ``Keeper``: what it keeps need not be
computed again, which makes a victim cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

from .kv_memory import KVMemory
from .req import Req


class Keeper(Protocol):
    """Keeps KV of requests that give way. Called from the scheduler's loop only; nothing waits."""

    def would_keep(self, req: Req) -> int:
        """How many of the request's first tokens would not have to be computed again; changes nothing."""

    def keep(self, req: Req) -> None:
        """The request is about to let go of its memory; what is wanted of it must be on its way when this returns."""


class KeepsNothing:
    """Without a second tier."""

    def would_keep(self, req: Req) -> int:
        """None."""
        return 0

    def keep(self, req: Req) -> None:
        """Nothing to do."""


def choose_victim(
    reqs: Sequence[Req], memory: KVMemory, keeper: Keeper, rank: Callable[[Req], int] = lambda req: 0
) -> Req:
    """Of ``reqs``, who hold memory: of those of the last ``rank`` the cheapest a page, among equals the one that came
    last. Not the one of the first rank that came first, where there is another.
    """
    oldest = min(reqs, key=lambda req: (rank(req), req.times.turn, req.rid))
    others = [req for req in reqs if req is not oldest] or [oldest]

    def cost(req: Req) -> tuple[int, Fraction, float, str]:
        private = memory.private_len(req)
        pages = memory.pages_up(private) // memory.page_size
        shared = memory.hold_of(req).kv_len - private
        again = max(1, req.total_len - max(shared, keeper.would_keep(req)))
        # One that gives nothing is no help, whatever it costs.
        return -rank(req), Fraction(again, pages) if pages else Fraction(1 << 62), -req.times.turn, req.rid

    return min(others, key=cost)
