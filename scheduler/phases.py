"""Accounts for the time of a request, by phase.

A request is in exactly one phase at any time, so its phases add up to its age. Each phase is charged to the instance
that spent it. For a request that is handed over, the decode keeps the account. The prefill reports how long the prompt
waited and was computed there.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..messages.outputs import InstanceRole, Phase, PhaseTime

MS = 1000


class PhaseClock:
    """Time account of one request on one instance, from ``time.monotonic()`` in seconds; durations are milliseconds.

    ``here``: role of this instance for the request. Invariant: all durations together are the time from ``began`` to
    the last ``upto`` or ``enter``.
    """

    __slots__ = ("_at", "_marked", "_since", "_spent", "here", "phase")

    def __init__(self, began: float, now: float, here: InstanceRole, waits_for: InstanceRole | None = None) -> None:
        self.here = here
        self.phase = Phase.QUEUE
        self._at = waits_for or here
        self._spent: dict[tuple[Phase, InstanceRole], float] = {(Phase.TOKENIZE, here): max(0.0, now - began) * MS}
        self._since = max(began, now)
        self._marked: dict[Phase, float] = {}

    def enter(self, phase: Phase, now: float, at: InstanceRole | None = None) -> None:
        """End the present phase at ``now`` and begin ``phase``, charged to this instance or to the one with the role
        ``at``.
        """
        self.upto(now)
        self.phase, self._at = phase, at or self.here

    def upto(self, now: float) -> None:
        """Charge the time until ``now`` to the present phase."""
        if now > self._since:
            self._add(self.phase, self._at, (now - self._since) * MS)
            self._since = now

    def spent(self, phase: Phase, at: InstanceRole | None = None) -> float:
        """Return the milliseconds spent in ``phase``, on the instance with the role ``at`` or, without it, on all."""
        return sum(ms for (one, where), ms in self._spent.items() if one is phase and at in (None, where))

    def times(self) -> list[PhaseTime]:
        """Return the milliseconds of each phase on each instance, in the order in which a request first enters the
        phases.
        """
        order = list(Phase)
        found = [PhaseTime(phase, at, ms) for (phase, at), ms in self._spent.items() if ms]
        return sorted(found, key=lambda one: order.index(one.phase))

    # --- hand-overs ---

    def mark(self, now: float) -> None:
        """Note that the peer asks for the prompt at ``now``. ``before_mark`` then returns what was spent before."""
        self.upto(now)
        self._marked = {phase: self.spent(phase, self.here) for phase in Phase}

    def before_mark(self, phase: Phase) -> float:
        """Return the milliseconds in a phase before the peer asked for the prompt (``mark``); 0 if it has not asked."""
        return self._marked.get(phase, 0.0)

    def credit(self, queue_ms: float, prefill_ms: float, ahead_ms: float, now: float) -> None:
        """Charge to the prefill instance what it reports of its time, instead of to this instance's TRANSFER and QUEUE.

        ``queue_ms`` and ``prefill_ms``: its times in these phases. It computed ``ahead_ms`` of ``prefill_ms`` before it
        was asked, while this instance had the request in its queue. No more is charged than there was: the two legs of
        a request need not arrive at the same time.
        """
        self.upto(now)
        wanted = max(0.0, prefill_ms)
        left = wanted - self._move(Phase.QUEUE, Phase.PREFILL, min(wanted, max(0.0, ahead_ms)))
        left -= self._move(Phase.TRANSFER, Phase.PREFILL, left)
        self._move(Phase.QUEUE, Phase.PREFILL, left)
        self._move(Phase.TRANSFER, Phase.QUEUE, max(0.0, queue_ms))

    def take_over(self, times: Iterable[PhaseTime], began: float, now: float) -> float:
        """Replace this account by that of another instance, which has stopped computing the request.

        The time since then counts as TRANSFER. Return when the request began, in seconds as ``now``: ``began``, or
        earlier if the account is longer.
        """
        self._spent = {}
        for one in times:
            self._add(one.phase, one.at, one.ms)
        total = sum(self._spent.values()) / MS
        began = min(began, now - total)
        self._since = began + total
        self.enter(Phase.TRANSFER, self._since)
        self.upto(now)
        return began

    def _add(self, phase: Phase, at: InstanceRole, ms: float) -> None:
        self._spent[phase, at] = self._spent.get((phase, at), 0.0) + ms

    def _move(self, source: Phase, target: Phase, ms: float) -> float:
        """Charge up to ``ms`` milliseconds of this instance's phase ``source`` to the prefill's phase ``target``
        instead.

        Return how many were moved.
        """
        moved = min(ms, self._spent.get((source, self.here), 0.0))
        if moved > 0:
            self._spent[source, self.here] -= moved
            self._add(target, "prefill", moved)
        return max(0.0, moved)
