"""Choice by the conversation that a request belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from ..facts import Facts
from ..instance import Instance, Role
from ..load import BalanceLimits
from .least_load import LeastLoadPolicy
from .options import PolicyOptions

MASK = (1 << 64) - 1


class SessionPolicy(LeastLoadPolicy):
    """Choice of the same instances for all requests with the same session key (``Facts.session_key``).

    It is rendezvous hashing: each instance has a score for each key, and the highest one wins. So several routers with
    the same URLs agree without a word, and an instance that comes or goes moves only its own sessions. Requests
    without a key go to the instance with the least load. All do if the chosen instance exceeds the balance limits.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._limits = BalanceLimits(options.balance_abs_threshold, options.balance_rel_threshold)

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the candidate that the session key leads to, unless it has too many requests."""
        if key := facts.session_key:
            number = _digest(key)
            chosen = max(candidates, key=lambda instance: number * _multiplier(instance.url) & MASK)
            if not self._limits.exceeds(chosen, candidates):
                return chosen
        return super().choose_leg(role, candidates, facts)


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


@lru_cache(maxsize=1024)
def _multiplier(url: str) -> int:
    """Return an odd random number for an instance. Its product with a key's digest is the score, modulo 2**64."""
    return _digest(url.encode()) | 1
