"""Who gives way when those that run need more memory than there is: the one that costs least for what it gives.

What it costs is the tokens to compute again; what it gives is the pages that nobody shares with it. Prefixes that
others use stay where they are, so a request that shares most of its prompt gives little, and costs little. The one that
came first never gives way, so that some request always comes to its end.

What the host tier will have of a request (``tiers.py``) need not be computed again, which makes a victim cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from .kv_memory import KVMemory
from .req import Req


def choose_victim(reqs: Sequence[Req], memory: KVMemory, rank: Callable[[Req], int] = lambda req: 0) -> Req:
    """Of ``reqs``, who hold memory: of those of the last ``rank`` the cheapest a page, among equals the one that came
    last. Not the one of the first rank that came first, where there is another.
    """
    oldest = min(reqs, key=lambda req: (rank(req), req.times.turn, req.rid))
    others = [req for req in reqs if req is not oldest] or [oldest]

    def cost(req: Req) -> tuple[int, Fraction, float, str]:
        private = memory.private_len(req)
        pages = memory.pages_up(private) // memory.page_size
        shared = memory.hold_of(req).kv_len - private
        again = max(1, req.total_len - max(shared, memory.kept_len(req)))
        # One that gives nothing is no help, whatever it costs.
        return -rank(req), Fraction(again, pages) if pages else Fraction(1 << 62), -req.times.turn, req.rid

    return min(others, key=cost)
