"""Choice by the conversation that a request belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from ..facts import Facts
from ..instance import Instance, Role
from ..work import believed_tokens
from .affinity import AffinityPolicy, Preference
from .options import PolicyOptions

MASK = (1 << 64) - 1


class SessionPolicy(AffinityPolicy):
    """Choice of the same instances for all requests with the same session key (``Facts.session_key``).

    It is rendezvous hashing: each instance has a score for each key, and the highest one wins. So several routers with
    the same URLs agree without a word, and an instance that comes or goes moves only its own sessions. Requests
    without a key go to the instance with the least load. All do if the chosen instance exceeds the balance limits.

    Session keys are hashed with a key that routers with the same cluster secret share. So clients can't compute session
    keys that all lead to one instance. Without a secret they can.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._hash_key = options.session_hash_key()

    def preferred(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Preference | None:
        """Return the candidate that the session key leads to. Its cache may have all of the prompt."""
        if not (key := facts.session_key):
            return None
        number = _digest(key, self._hash_key)
        chosen = max(candidates, key=lambda instance: number * _multiplier(instance.url) & MASK)
        return Preference(chosen, believed_tokens(chosen, facts.prompt_tokens, facts.body.batch_size or 1))


def _digest(data: bytes, key: bytes = b"") -> int:
    return int.from_bytes(blake2b(data, digest_size=8, key=key).digest())


@lru_cache(maxsize=1024)
def _multiplier(url: str) -> int:
    """Return an odd random number for an instance. Its product with a key's digest is the score, modulo 2**64."""
    return _digest(url.encode()) | 1
