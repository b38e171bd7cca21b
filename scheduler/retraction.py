"""Chooses the request to retract when memory is short: the one that costs least for what it frees.

Its cost is the tokens to compute again. It frees the pages that no other request shares with it. Prefixes that others
use stay where they are, so a request that shares most of its prompt frees little, and costs little. The oldest request
is never retracted, so that some request always comes to its end.

What the host tier will have of a request (``tiers.py``) need not be computed again, which makes a victim cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from .kv_memory import KVMemory
from .req import Req


def choose_victim(reqs: Sequence[Req], memory: KVMemory, rank: Callable[[Req], int] = lambda req: 0) -> Req:
    """Return the request to retract among ``reqs``, which hold memory.

    That is the one in the last ``rank`` with the lowest cost per freed page; among equals, the last to arrive. It is
    not the first to arrive in the first rank, unless that is the only one.
    """
    oldest = min(reqs, key=lambda req: (rank(req), req.times.turn, req.rid))
    others = [req for req in reqs if req is not oldest] or [oldest]

    def cost(req: Req) -> tuple[int, Fraction, float, str]:
        private = memory.private_len(req)
        pages = memory.pages_up(private) // memory.page_size
        shared = memory.hold_of(req).kv_len - private
        again = max(1, req.total_len - max(shared, memory.kept_len(req)))
        # Retracting a request that frees nothing does not help, whatever it costs.
        return -rank(req), Fraction(again, pages) if pages else Fraction(1 << 62), -req.times.turn, req.rid

    return min(others, key=cost)
