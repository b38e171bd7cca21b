"""Choice at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..facts import Facts
from ..instance import Instance, Role
from .leg_policy import LegPolicy


class RandomPolicy(LegPolicy):
    """Choice at random, with equal probabilities."""

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return one of ``candidates``, each with the same probability."""
        return random.choice(candidates)
