"""Choice of the better of two random instances."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..facts import Facts
from ..instance import Instance, Role
from ..load import least_loaded
from .leg_policy import LegPolicy


class PowerOfTwoPolicy(LegPolicy):
    """Choice of the less loaded of two random instances.

    Several routers that see the same load choose different instances, so they do not overload the idlest one. See M.
    Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the less loaded one (``load.least_loaded``) of two random candidates."""
        drawn = random.sample(candidates, 2) if len(candidates) > 1 else candidates
        return least_loaded(role, drawn, facts.prompt_tokens)
