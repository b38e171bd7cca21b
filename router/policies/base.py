"""A policy chooses one of several healthy instances of the same role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..instance import Instance
from ..request_body import RequestBody


class Policy(ABC):
    """Chooses one instance. A router holds one policy object a role, so a policy may keep state about its role."""

    @abstractmethod
    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """Return one of ``candidates``. There is at least one, all can serve, in the order of the router's options."""
