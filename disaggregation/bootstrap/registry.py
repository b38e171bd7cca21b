"""The registration that a bootstrap server gives out.

    (none) ─register─▶ current ─▶ withdrawn, expired or replaced by another epoch

A renewal keeps the lease; an expired lease can be renewed, since its owner may only have been slow. An epoch that was
replaced or has withdrawn is over: what still arrives from it is refused, so that it can't come back over its successor.
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
        self._retired: deque[str] = deque(maxlen=MAX_RETIRED)

    def register(self, registration: Registration) -> None:
        """Make ``registration`` the current one, or renew its lease.

        Raises ``RegistrationConflict`` for an epoch that is over.
        """
        if registration.epoch in self._retired:
            raise RegistrationConflict(f"epoch {registration.epoch} has withdrawn or was replaced by a newer instance")
        if self._registration is not None and self._registration.epoch != registration.epoch:
            self._retired.append(self._registration.epoch)
        self._registration = registration
        self._expires = self._clock() + registration.ttl

    def current(self) -> Registration:
        """The registration; raises ``NotRegistered`` with the reason why there is none."""
        if self._registration is None:
            raise NotRegistered("the instance is draining" if self._retired else "the instance has not registered yet")
        late = self._clock() - self._expires
        if late > 0:
            raise NotRegistered(f"the lease of the instance ran out {late:.1f} s ago: it hangs or has just died")
        return self._registration

    def withdraw(self, epoch: str) -> None:
        """Take the registration of ``epoch`` out; raises ``RegistrationConflict`` where it is not the current one.

        Withdrawing twice is fine.
        """
        if epoch in self._retired:
            return
        if self._registration is None or self._registration.epoch != epoch:
            raise RegistrationConflict(f"epoch {epoch} is not registered here")
        self._retired.append(epoch)
        self._registration = None
