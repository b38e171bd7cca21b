"""The base of policies that choose each leg by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ..facts import Facts
from ..instance import Instance, Role
from ..load import queued, relieved
from ..targets import Offer, Pair, Target
from .base import Policy


class LegPolicy(Policy):
    """Policy that chooses one instance of each role.

    Of the pair and the worker, the one with less queued serves the request. If the decode has too much to do, the
    prefill serves it alone.
    """

    def choose(self, offer: Offer, facts: Facts) -> Target:
        """Return the chosen pair or worker, whichever has less queued. The pair comes first if they are equal."""
        targets: list[Target] = []
        if offer.prefills:
            prefill = self.choose_leg(Role.PREFILL, offer.prefills, facts)
            if offer.decodes:
                targets.append(relieved(Pair(prefill, self.choose_leg(Role.DECODE, offer.decodes, facts))))
            else:
                targets.append(prefill)
        if offer.workers:
            targets.append(self.choose_leg(Role.UNIFIED, offer.workers, facts))
        return min(targets, key=queued)

    @abstractmethod
    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return one of ``candidates``, of which there is at least one.

        ``role``: the part of the request that it would serve. A call does not mean that the instance gets the request.
        """
