"""Policies that choose one of several healthy instances of the same role."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from .instance import Instance
from .request_body import RequestBody


class Policy(ABC):
    """Chooses one instance. A router holds one policy object a role, so a policy may keep state about its role."""

    @abstractmethod
    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """Return one of ``candidates``. There is at least one, all can serve, in the order of the router's options."""


class RandomPolicy(Policy):
    """Choice at random, with equal probabilities."""

    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """See ``Policy``."""
        return random.choice(candidates)


class RoundRobinPolicy(Policy):
    """Choice of each instance in turn. It only counts, so an instance that comes or goes disturbs the order once."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """See ``Policy``."""
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen


POLICIES: dict[str, Callable[[], Policy]] = {"random": RandomPolicy, "round_robin": RoundRobinPolicy}
