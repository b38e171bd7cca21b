"""Choice at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..instance import Instance
from ..request_body import RequestBody
from .base import Policy


class RandomPolicy(Policy):
    """Choice at random, with equal probabilities."""

    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """Return one of ``candidates``, each with the same probability."""
        return random.choice(candidates)
