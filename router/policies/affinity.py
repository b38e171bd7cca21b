"""The base of policies that prefer an instance for what its cache has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ..facts import Facts
from ..instance import Instance, Role
from ..load import ANSWER_TOKENS, work
from .least_load import LeastLoadPolicy
from .options import PolicyOptions


class Preference(NamedTuple):
    """The instance that a request should go to for the sake of its cache."""

    instance: Instance
    saved: int
    """Maximum number of prompt tokens that its cache saves."""


class BalanceLimits(NamedTuple):
    """Limits within which an instance may have more to do than others, for the sake of its cache.

    They are on requests, and on ``load.work``. Either is exceeded if it is above both the absolute and the relative
    limit.
    """

    absolute: int
    """Requests that it may have more than the candidate with the fewest. Of work, ``ANSWER_TOKENS`` for each."""
    relative: float
    """Factor by which it may have more than that candidate."""

    def exceeds(self, preference: Preference, candidates: Sequence[Instance]) -> bool:
        """Return whether the preferred instance has too much to do, compared with the least loaded of ``candidates``.

        It may always have as much more work as its cache can save. So prompts of a length that clients choose do not
        queue at one instance while others are idle.
        """
        instance, saved = preference
        if instance.running > self.absolute:
            fewest = min(one.running for one in candidates)
            if instance.running - fewest > self.absolute and instance.running > self.relative * fewest:
                return True
        most = max(self.absolute * ANSWER_TOKENS, saved)
        if (has := work(instance)) <= most:
            return False
        least = min(map(work, candidates))
        return has - least > most and has > self.relative * least


class AffinityPolicy(LeastLoadPolicy):
    """Choice of a preferred instance, or of the one with the least load if that has much more to do than others."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._limits = BalanceLimits(options.balance_abs_threshold, options.balance_rel_threshold)

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the preferred candidate, unless there is none or it exceeds the balance limits."""
        preference = self.preferred(role, candidates, facts) if len(candidates) > 1 else None
        if preference is None or self._limits.exceeds(preference, candidates):
            return self.least_loaded(role, candidates, facts)
        return preference.instance

    def least_loaded(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the candidate with the least load."""
        return super().choose_leg(role, candidates, facts)

    @abstractmethod
    def preferred(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Preference | None:
        """Return the candidate that the request should go to whatever its load; None if any will do.

        There are at least two candidates. ``role``: the part of the request that they would serve.
        """
