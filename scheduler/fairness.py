"""Fair shares between clients: the one that has received the least service goes next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each client has a counter
of the work that was done for it. Computed prompt tokens count 1, output tokens ``OUTPUT_WEIGHT``. The next admission
goes to the waiting client with the lowest counter. A client that returns after a time without requests is lifted to a
*clock*, so idling earns no credit. Of two clients that always wait, neither gets ahead by more than the cost of one
admission and of the output of what runs.

A client is an API key; below it, the ``user`` that a request names. Naming many users brings no more than the key's
share.

The clock advances with the work, divided by the number of competing clients that have requests. All of their counters
would advance like that if they were served side by side. A new client begins at the clock, but not below the lowest
waiting counter (where the paper has it begin), nor above the highest.

- Why not at the lowest: a client may name a new user with each request. If each began as low as the lowest, a client
  above would wait for all of them, for ever.
- Why not above the highest: the others wait for running requests as well, and the work of these moved the clock.

A client that has no requests and is not above the clock is forgotten: as an unknown one, it would begin there anyway.
So only debts are remembered.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple

OUTPUT_WEIGHT = 2.0
"""Weight of an output token; a prompt token counts 1 (the paper's choice)."""
MOST_REMEMBERED = 1024
"""Maximum remembered debts of idle keys, and of one key's idle users. Beyond that the smallest are dropped."""

FEW = 64
"""Stale heap entries allowed beyond the number of names that wait."""


class Tenant(NamedTuple):
    """Sender of a request: the name of its API key and its ``user``; "" if not given."""

    key: str = ""
    user: str = ""


class _Competition:
    """Counters of names that compete with each other: all keys, or one key's users.

    A name is unknown → here (it has requests) and, at times, waiting → remembered, if it is in debt → unknown.
    """

    def __init__(self) -> None:
        self.here: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._work: dict[str, float] = {}
        self._line: list[tuple[float, str]] = []
        """Heap of waiting names. Their counters may have grown since, and some no longer wait."""
        self._highest: tuple[float, str] | None = None
        """Highest counter among the waiting names; None if it has to be searched."""
        self._clock = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no counter has to be remembered."""
        return not (self.here or self._waiting or self._work)

    @property
    def remembered(self) -> int:
        """Number of remembered names without requests."""
        return sum(1 for name in self._work if name not in self.here)

    def of(self, name: str) -> float:
        """Return the counter of a name, the work done for it; for an unknown name the clock, where it would begin."""
        return self._work.get(name, self._clock)

    def comes(self, name: str) -> None:
        """Count one more request of the name."""
        self.here[name] += 1

    def goes(self, name: str) -> None:
        """Count one request of the name less, and forget it if it was the last and no debt is left."""
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
        """Count one more waiting entry of the name.

        If it is the name's first one, its counter is raised to about where those of other waiting names are. So an idle
        name saves up no claim. ``again``: the entry has waited before, so its name was not idle and is not raised.
        """
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
        """Count one waiting entry of the name less: the opposite of ``waits``."""
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]
            if self._highest is not None and self._highest[1] == name:
                self._highest = None
        if not self._waiting:
            # A name that comes next was idle while this one was served.
            self._clock = max(self._clock, self.of(name))
            self._line.clear()

    def add(self, name: str, work: float) -> None:
        """Charge the name for work done for it. Advance the clock by the work, divided by the number of names."""
        self._work[name] = self.of(name) + work
        self._clock += work / max(1, len(self.here))
        if name in self._waiting:
            self._note_highest(name)

    def _note_highest(self, name: str) -> None:
        if self._highest is not None and self.of(name) > self._highest[0]:
            self._highest = self.of(name), name

    def _top(self) -> tuple[float, str]:
        """Return the highest waiting counter and its name; at least one name must wait."""
        if self._highest is None:
            self._highest = max((self.of(name), name) for name in self._waiting)
        return self._highest

    def _lowest(self) -> float:
        """Return the lowest waiting counter; at least one name must wait."""
        while self._line:
            work, name = self._line[0]
            if name not in self._waiting:
                heapq.heappop(self._line)
            elif work < (now := self.of(name)):
                heapq.heapreplace(self._line, (now, name))
            else:
                return work
        raise AssertionError("no request waits")


class FairShares:
    """Counters of keys, and of users below them."""

    def __init__(self) -> None:
        self._keys = _Competition()
        self._users: dict[str, _Competition] = {}

    @property
    def remembered(self) -> int:
        """Number of keys and users that are remembered without having requests."""
        return self._keys.remembered + sum(users.remembered for users in self._users.values())

    def lane(self, tenant: Tenant) -> Tenant:
        """Return the tenant that requests of ``tenant`` wait as: ``tenant`` itself, so each has a lane of its own in
        the queue.
        """
        return tenant

    def comes(self, tenant: Tenant) -> None:
        """Count a request of the tenant that was admitted, until ``goes``."""
        self._keys.comes(tenant.key)
        self._users_of(tenant).comes(tenant.user)

    def goes(self, tenant: Tenant) -> None:
        """Count a request of the tenant that has ended. A tenant without requests is forgotten unless it is in debt."""
        self._keys.goes(tenant.key)
        users = self._users_of(tenant)
        users.goes(tenant.user)
        if users.is_idle:
            del self._users[tenant.key]

    def waits(self, tenant: Tenant, *, again: bool = False) -> None:
        """Note that the tenant's first request of one rank was queued.

        ``again``: the request waited before, and was out of the queue for a while: its grant was revoked, or a
        migration failed. Its tenant has asked all the time, so it is not lifted to the clock.
        """
        self._keys.waits(tenant.key, again=again)
        self._users_of(tenant).waits(tenant.user, again=again)

    def waits_no_more(self, tenant: Tenant) -> None:
        """Note that the tenant's last request of one rank has left the queue."""
        self._keys.waits_no_more(tenant.key)
        self._users_of(tenant).waits_no_more(tenant.user)

    def prompt(self, tenant: Tenant, tokens: int) -> None:
        """Charge the tenant for prompt tokens that are to be computed."""
        self._add(tenant, tokens)

    def output(self, tenant: Tenant, tokens: int) -> None:
        """Charge the tenant for generated tokens, each with ``OUTPUT_WEIGHT``."""
        self._add(tenant, OUTPUT_WEIGHT * tokens)

    def share(self, tenant: Tenant) -> tuple[float, float]:
        """Return the sort key of the tenant, lowest first: the key's counter, then the user's."""
        return self._keys.of(tenant.key), self._users_of(tenant).of(tenant.user)

    def is_below_share(self, key: str, room: int) -> bool:
        """Return whether an API key has fewer requests here than its part of a queue of ``room`` requests.

        The part is ``room`` divided by the number of keys with requests, ``key`` included, however full others made the
        queue. So k keys have at most ``room * (1 + 1/2 + … + 1/k)`` requests.
        """
        mine = self._keys.here[key]
        return mine < room // (len(self._keys.here) + (not mine))

    def has_share_for_others(self, room: int) -> bool:
        """Return whether an API key without requests here would have a part of a queue of ``room`` requests."""
        return len(self._keys.here) < room

    def _users_of(self, tenant: Tenant) -> _Competition:
        # This runs for each comparison of shares, so nothing is made that is not needed.
        if (users := self._users.get(tenant.key)) is None:
            users = self._users[tenant.key] = _Competition()
        return users

    def _add(self, tenant: Tenant, work: float) -> None:
        self._keys.add(tenant.key, work)
        self._users_of(tenant).add(tenant.user, work)


class NoShares:
    """The ``FairShares`` of an instance that does not count service by tenant: all requests wait as one."""

    def lane(self, tenant: Tenant) -> Tenant:
        """Return one and the same tenant for all, so that all requests wait in one lane."""
        return EVERYBODY

    def comes(self, tenant: Tenant) -> None:
        """Do nothing: requests are not counted by tenant."""

    def goes(self, tenant: Tenant) -> None:
        """Do nothing: requests are not counted by tenant."""

    def waits(self, tenant: Tenant, *, again: bool = False) -> None:
        """Do nothing: waiting requests are not counted by tenant."""

    def waits_no_more(self, tenant: Tenant) -> None:
        """Do nothing: waiting requests are not counted by tenant."""

    def prompt(self, tenant: Tenant, tokens: int) -> None:
        """Do nothing: no tenant is charged for prompt tokens."""

    def output(self, tenant: Tenant, tokens: int) -> None:
        """Do nothing: no tenant is charged for output tokens."""

    def share(self, tenant: Tenant) -> tuple[float, float]:
        """Return the same sort key for every tenant, so that none goes before another."""
        return NO_SHARE

    def is_below_share(self, key: str, room: int) -> bool:
        """Return False: no key has a share of its own in the queue, so a full queue refuses every key."""
        return False

    def has_share_for_others(self, room: int) -> bool:
        """Return False: a full queue refuses every key."""
        return False


Shares = FairShares | NoShares
EVERYBODY = Tenant()
NO_SHARE = (0.0, 0.0)
