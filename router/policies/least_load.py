"""Choice of the instance with the least to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..facts import Facts
from ..instance import Instance, Role
from ..load import least_loaded
from .leg_policy import LegPolicy
from .options import PolicyOptions


class LeastLoadPolicy(LegPolicy):
    """Choice of the instance at which the request is estimated to take the least time.

    Equal ones, and those without requests, take turns.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._choices: Counter[Role] = Counter()

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the least loaded candidate (``load.least_loaded``)."""
        if len(candidates) == 1:
            return candidates[0]
        first = self._choices[role] % len(candidates)
        self._choices[role] += 1
        in_turn = [*candidates[first:], *candidates[:first]]
        return least_loaded(role, in_turn, facts.prompt_tokens)
