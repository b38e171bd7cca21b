"""Choice of each instance in turn."""

from __future__ import annotations

from collections.abc import Sequence

from ..instance import Instance
from ..request_body import RequestBody
from .base import Policy


class RoundRobinPolicy(Policy):
    """Choice of each instance in turn. It only counts, so an instance that comes or goes disturbs the order once."""

    def __init__(self) -> None:
        self._chosen = 0

    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """Return one of ``candidates``; each call returns the one after that of the call before, in a circle."""
        chosen = candidates[self._chosen % len(candidates)]
        self._chosen += 1
        return chosen
