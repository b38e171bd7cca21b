"""Choice of each instance in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..facts import Facts
from ..instance import Instance, Role
from .leg_policy import LegPolicy
from .options import PolicyOptions


class RoundRobinPolicy(LegPolicy):
    """Choice of each instance in turn. It only counts, so an instance that comes or goes disturbs the order once."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._chosen: Counter[Role] = Counter()

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return one of ``candidates``; each call returns the one after that of the call before, in a circle."""
        chosen = candidates[self._chosen[role] % len(candidates)]
        self._chosen[role] += 1
        return chosen
