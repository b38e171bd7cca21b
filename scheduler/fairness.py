"""Fair shares between those who send requests: who has been given least goes next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each client has a
counter of the work that was done for it, prompt tokens that were computed and output tokens at ``OUTPUT_WEIGHT``
times as much, and the next admission goes to a client that waits and has the lowest. Who comes back after it had
nothing to ask is lifted to a *clock*: not having asked is no credit. So of two that always wait neither gets ahead of
the other by more than what one admission, and the output of what runs, may cost.

A client is an API key; below it, the ``user`` that a request names: to name many brings no more than its key's share.

The clock of those who compete goes on with the work, divided by how many of them have requests: as all of their
counters would, were they served side by side. Who comes begins there, but not below the lowest that waits (where the
paper has it begin), nor above the highest. Why not at the lowest: anybody may name a new user with each request, and if
each began as low as the lowest, one who is above would wait for all of them, for ever. Why not above the highest: the
others wait for what runs as well, whose work moved the clock.

Who has nothing to ask and is not above the clock is forgotten: as one that was never seen, it would begin there. So
what is remembered are debts alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple

OUTPUT_WEIGHT = 2.0
"""What a token of output counts, where one of a prompt counts 1 (the paper's choice)."""
MOST_REMEMBERED = 1024
"""Debts of keys, and of one key's users, that have nothing to ask. Of more than these the smallest are let off."""

FEW = 64
"""Entries for those that wait no more, beside as many as there are of those that do."""


class Tenant(NamedTuple):
    """Whose request it is: an API key's name, and the user that it was sent for; "" where nobody said."""

    key: str = ""
    user: str = ""


class _Competition:
    """Those who compete with each other, by name: all keys, or one key's users.

    A name is unknown → here (it has requests) and, at times, waiting → remembered, if it is in debt → unknown.
    """

    def __init__(self) -> None:
        self.here: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._work: dict[str, float] = {}
        self._line: list[tuple[float, str]] = []
        """A heap of those that wait; their counters may have grown since, and some wait no more."""
        self._highest: tuple[float, str] | None = None
        """Of those that wait; None: to be looked for."""
        self._clock = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing that is worth to be remembered."""
        return not (self.here or self._waiting or self._work)

    @property
    def remembered(self) -> int:
        """Names that have nothing to ask."""
        return sum(1 for name in self._work if name not in self.here)

    def of(self, name: str) -> float:
        """Work done for it."""
        return self._work.get(name, self._clock)

    def comes(self, name: str) -> None:
        """It has one more request."""
        self.here[name] += 1

    def goes(self, name: str) -> None:
        """It has one less."""
        self.here[name] -= 1
        if self.here[name]:
            return
        del self.here[name]
        if self.of(name) <= self._clock:
            self._work.pop(name, None)
        elif len(self._work) > len(self.here) + 2 * MOST_REMEMBERED:
            self._forget()

    def _forget(self) -> None:
        debts = {name: work for name, work in self._work.items() if name not in self.here and work > self._clock}
        kept = heapq.nlargest(MOST_REMEMBERED, debts, key=debts.__getitem__)
        self._work = {name: self._work[name] for name in (*kept, *self.here) if name in self._work}

    def waits(self, name: str, *, again: bool) -> None:
        """It has something that waits, which it had not; or once more. ``again``: that has waited before."""
        if name in self._waiting:
            self._waiting[name] += 1
            return
        start = self._clock
        if self._waiting:
            self._clock = max(self._clock, lowest := self._lowest())
            start = max(lowest, min(self._clock, self._top()[0]))
        self._waiting[name] = 1
        work = self._work.get(name, start)
        self._work[name] = work if again else max(work, start)
        self._note_highest(name)
        heapq.heappush(self._line, (self._work[name], name))
        if len(self._line) > 2 * len(self._waiting) + FEW:
            self._line = [(self.of(other), other) for other in self._waiting]
            heapq.heapify(self._line)

    def waits_no_more(self, name: str) -> None:
        """The opposite of ``waits``."""
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]
            if self._highest is not None and self._highest[1] == name:
                self._highest = None
        if not self._waiting:
            # Whoever comes next was asking for nothing while this one was served.
            self._clock = max(self._clock, self.of(name))
            self._line.clear()

    def add(self, name: str, work: float) -> None:
        """So much was done for it."""
        self._work[name] = self.of(name) + work
        self._clock += work / max(1, len(self.here))
        if name in self._waiting:
            self._note_highest(name)

    def _note_highest(self, name: str) -> None:
        if self._highest is not None and self.of(name) > self._highest[0]:
            self._highest = self.of(name), name

    def _top(self) -> tuple[float, str]:
        """The highest that waits, where anybody does."""
        if self._highest is None:
            self._highest = max((self.of(name), name) for name in self._waiting)
        return self._highest

    def _lowest(self) -> float:
        """The counter of the lowest that waits, where anybody does."""
        while self._line:
            work, name = self._line[0]
            if name not in self._waiting:
                heapq.heappop(self._line)
            elif work < (now := self.of(name)):
                heapq.heapreplace(self._line, (now, name))
            else:
                return work
        raise AssertionError("nobody waits")


class FairShares:
    """The counters of keys, and of users below them."""

    def __init__(self) -> None:
        self._keys = _Competition()
        self._users: dict[str, _Competition] = {}

    @property
    def remembered(self) -> int:
        """Keys and users that have nothing to ask, and are known all the same."""
        return self._keys.remembered + sum(users.remembered for users in self._users.values())

    def comes(self, tenant: Tenant) -> None:
        """A request of its was taken in."""
        self._keys.comes(tenant.key)
        self._users_of(tenant).comes(tenant.user)

    def goes(self, tenant: Tenant) -> None:
        """One of its requests is over."""
        self._keys.goes(tenant.key)
        users = self._users_of(tenant)
        users.goes(tenant.user)
        if users.is_idle:
            del self._users[tenant.key]

    def waits(self, tenant: Tenant, *, again: bool = False) -> None:
        """It had nothing that waits (in one rank), and now has. ``again``: a request that had got its turn for nothing,
        so the tenant has asked all the time, and is not lifted to the clock.
        """
        self._keys.waits(tenant.key, again=again)
        self._users_of(tenant).waits(tenant.user, again=again)

    def waits_no_more(self, tenant: Tenant) -> None:
        """Now it has nothing."""
        self._keys.waits_no_more(tenant.key)
        self._users_of(tenant).waits_no_more(tenant.user)

    def prompt(self, tenant: Tenant, tokens: int) -> None:
        """So many tokens of a prompt are to be computed."""
        self._add(tenant, tokens)

    def output(self, tenant: Tenant, tokens: int) -> None:
        """So many were generated."""
        self._add(tenant, OUTPUT_WEIGHT * tokens)

    def share(self, tenant: Tenant) -> tuple[float, float]:
        """Lower goes first: what the key has had, then what the user has."""
        return self._keys.of(tenant.key), self._users_of(tenant).of(tenant.user)

    def is_owed_room(self, key: str, room: int) -> bool:
        """Whether the key has less than its part of a queue of ``room`` requests, however full others made that. One
        key may have ``room``, so k of them have ``room * (1 + 1/2 + … + 1/k)`` at most.
        """
        mine = self._keys.here[key]
        return mine < room // (len(self._keys.here) + (not mine))

    def _users_of(self, tenant: Tenant) -> _Competition:
        return self._users.setdefault(tenant.key, _Competition())

    def _add(self, tenant: Tenant, work: float) -> None:
        self._keys.add(tenant.key, work)
        self._users_of(tenant).add(tenant.user, work)
