"""A pair of instances over one store that has a prompt's KV pages."""

from __future__ import annotations

from pdserve.scheduler.first_token import NOTHING, Load
from pdserve.scheduler.req import Req
from support.sim_pair import run_until_idle
from support.sim_tiered_pair import TieredPair

PROMPT = [(7 * i) % 90 + 3 for i in range(42)]
"""Ten pages of four, and two tokens."""
SLOW = 1000.0
"""Milliseconds of the way that is not to be taken."""


class Says:
    """A forecast by tokens to be computed."""

    def __init__(self, ms_a_token: float = 0.0, ms: float = 0.0) -> None:
        self._ms_a_token, self._ms = ms_a_token, ms

    def first_token_ms(self, req: Req, uncached: int, now: float, expected: Load = NOTHING) -> float:
        return self._ms + self._ms_a_token * uncached

    def uncached(self, req: Req) -> int:
        return req.prompt_len

    def compute_ms(self, req: Req, tokens: int) -> float:
        return 1e9  # the store is waited for as long as the policy allows


def stored(prompt=PROMPT) -> dict[bytes, bytes]:
    """Return the pages of a store that an earlier pair has written a prompt to."""
    pair = TieredPair()
    pair.submit("before", prompt, 1, max_new_tokens=2)
    run_until_idle(pair)
    assert len(pair.kept) >= 10
    return pair.kept


def make_pair(kept=None, *, here=1.0, there=SLOW, lag_ms=0.0, **changes) -> TieredPair:
    """Make a pair over the store ``kept``, with the default that ``stored`` returns.

    ``here``: milliseconds of a token that the decode computes. ``there``: milliseconds until the prefill's first token.
    ``lag_ms``: milliseconds of a page after that.
    """
    pair = TieredPair(stored() if kept is None else kept, **({"disaggregation_threshold": "auto"} | changes))
    pair.decode.choice._estimator = Says(here)
    pair.prefill.senders.estimates._estimator = Says(ms=there)
    for _ in range(100 if lag_ms else 0):
        for pages in (4, 40):
            pair.decode.choice.learn_lag("prefill", pages, lag_ms * pages / 1000, now=1.0)
    return pair


def first_counts(pair: TieredPair) -> tuple[int, int, int, int]:
    counts = pair.decode.receivers.placement.store_first.counts
    return counts.came, counts.late, counts.lost, counts.tokens
