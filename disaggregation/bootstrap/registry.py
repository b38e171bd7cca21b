"""The registration that a bootstrap server gives out.

    (none) ─register─▶ current ─▶ withdrawn, expired or replaced by another epoch
                  ▲       │ for now
                  └─ away ◀

A renewal keeps the lease. An expired lease can be renewed, because its owner may only have been slow. An epoch that was
replaced or has withdrawn is over. Its later messages are refused, so that it cannot replace its successor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..errors import NotRegistered, RegistrationConflict
from .registration import Registration

MAX_RETIRED = 1024


class Registry:
    """Holds one registration. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registration: Registration | None = None
        self._expires = 0.0
        self._away: str | None = None
        """The epoch that has withdrawn for now."""
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)

    def register(self, registration: Registration) -> None:
        """Make ``registration`` the current one, in place of any other epoch's, or renew its lease.

        Raises ``RegistrationConflict`` for an epoch that has withdrawn or was replaced.
        """
        if registration.epoch in self._retired:
            raise RegistrationConflict(f"epoch {registration.epoch} has withdrawn or was replaced by a newer instance")
        before = self._away if self._registration is None else self._registration.epoch
        if before is not None and before != registration.epoch:
            self._retired.append(before)
        self._away = None
        self._registration = registration
        self._expires = self._clock() + registration.ttl

    def current(self) -> Registration:
        """Return the registration; raises ``NotRegistered`` with the reason if there is none."""
        if self._away is not None:
            raise NotRegistered("the instance exchanges no KV just now: its memory was given back")
        if self._registration is None:
            raise NotRegistered("the instance is draining" if self._retired else "the instance has not registered yet")
        late = self._clock() - self._expires
        if late > 0:
            raise NotRegistered(f"the lease of the instance ran out {late:.1f} s ago: it hangs or has just died")
        return self._registration

    def withdraw(self, epoch: str, *, for_now: bool = False) -> None:
        """Remove the registration of ``epoch``. Do nothing if that was done before.

        ``for_now``: the same epoch may register again later. Otherwise its later registrations are refused. Raises
        ``RegistrationConflict`` if another epoch, or none, is registered.
        """
        if epoch in self._retired or (for_now and epoch == self._away):
            return
        if epoch == self._away:
            self._away = None
            self._retired.append(epoch)
            return
        if self._registration is None or self._registration.epoch != epoch:
            raise RegistrationConflict(f"epoch {epoch} is not registered here")
        if for_now:
            self._away = epoch
        else:
            self._retired.append(epoch)
        self._registration = None
