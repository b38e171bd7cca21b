"""The registry of routing policies, which ``--policy`` names.

To add one, write its class in a file of this folder and add a line to ``POLICIES``. Then run ``make docs``, which
lists the choices of ``--policy``. The class is imported only when its policy is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

POLICIES = {
    "random": "at_random.RandomPolicy",
    "round_robin": "round_robin.RoundRobinPolicy",
    "power_of_two": "power_of_two.PowerOfTwoPolicy",
    "least_load": "least_load.LeastLoadPolicy",
    "session": "session.SessionPolicy",
    "cache_aware": "cache_aware.CacheAwarePolicy",
}
"""Module of this folder and class, by name."""

if TYPE_CHECKING:
    RoutingPolicyName = str
else:
    RoutingPolicyName = Literal[tuple(POLICIES)]
"""A name in ``POLICIES``. The command line shows and checks these choices; a type checker can't read them."""
