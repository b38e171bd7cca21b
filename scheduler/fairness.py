"""Fair shares between those who send requests: who has been given least goes next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each client has a
counter of the work that was done for it, prompt tokens that were computed and output tokens at ``OUTPUT_WEIGHT``
times as much, and the next admission goes to a client that waits and has the lowest. Who comes back after it had
nothing to ask is lifted to the lowest of those that waited meanwhile: not having asked is no credit. So of two that
always wait neither gets ahead of the other by more than what one admission, and the output of what runs, may cost.

A client is an API key; below it, the ``user`` that a request names: to name many brings no more than its key's share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

OUTPUT_WEIGHT = 2.0
"""What a token of output counts, where one of a prompt counts 1 (the paper's choice)."""
MOST_REMEMBERED = 8192
"""Counters are kept of so many that have nothing to ask; of those that come back later nothing is known."""


class Tenant(NamedTuple):
    """Whose request it is: an API key's name, and the user that it was sent for; "" where nobody said."""

    key: str = ""
    user: str = ""


class _Counters:
    """Work done by name: of those that wait, and, the latest ones, of those that don't."""

    def __init__(self) -> None:
        self._work: OrderedDict[Tenant, float] = OrderedDict()

    def of(self, name: Tenant) -> float:
        """Of one that was seen before."""
        return self._work.get(name, 0.0)

    def comes_back(self, name: Tenant, others: Iterable[Tenant]) -> None:
        """``name`` has something to ask again, ``others`` waited meanwhile."""
        floor = min((self.of(other) for other in others), default=0.0)
        self._work[name] = max(self.of(name), floor)
        self._work.move_to_end(name)
        if len(self._work) > 2 * MOST_REMEMBERED:
            for _ in range(MOST_REMEMBERED):
                self._work.popitem(last=False)

    def add(self, name: Tenant, work: float) -> None:
        """So much was done for it."""
        self._work[name] = self.of(name) + work
        self._work.move_to_end(name)


class FairShares:
    """The counters of keys, and of users below them."""

    def __init__(self) -> None:
        self._keys = _Counters()
        self._users = _Counters()

    def comes_back(self, tenant: Tenant, waiting: Iterable[Tenant]) -> None:
        """``tenant`` had nothing that waits, and now has; ``waiting``: those who have."""
        waiting = list(waiting)
        key = Tenant(tenant.key)
        if all(other.key != tenant.key for other in waiting):
            self._keys.comes_back(key, {Tenant(other.key) for other in waiting})
        self._users.comes_back(tenant, (other for other in waiting if other.key == tenant.key))

    def prompt(self, tenant: Tenant, tokens: int) -> None:
        """So many tokens of a prompt are to be computed."""
        self._add(tenant, tokens)

    def output(self, tenant: Tenant, tokens: int) -> None:
        """So many were generated."""
        self._add(tenant, OUTPUT_WEIGHT * tokens)

    def share(self, tenant: Tenant) -> tuple[float, float]:
        """Lower goes first: what the key has had, then what the user has."""
        return self._keys.of(Tenant(tenant.key)), self._users.of(tenant)

    def _add(self, tenant: Tenant, work: float) -> None:
        self._keys.add(Tenant(tenant.key), work)
        self._users.add(tenant, work)
