"""The registry of schedule policies: the orders of waiting requests that ``--schedule-policy`` names.

To add one, write its class in a file of ``policies/`` and add a line to ``POLICIES``. The class is imported only when
its policy is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class PolicySpec(NamedTuple):
    """One policy."""

    path: str
    """Module of ``policies/`` and class."""
    reads_cache: bool = False
    """Whether it orders requests by their cached prefixes, so that it needs a prefix cache."""
    implies_priorities: bool = False
    """Whether the priorities of requests count with it, as with ``--enable-priority-scheduling``."""


POLICIES = {
    "fcfs": PolicySpec("sort_key.FirstComeFirstServed"),
    "srpf": PolicySpec("by_remaining.ShortestRemainingFirst"),
    "lpm": PolicySpec("by_prefix.LongestPrefixMatch", reads_cache=True),
    "dfs-weight": PolicySpec("by_prefix.HeaviestPrefixFirst", reads_cache=True),
    "lof": PolicySpec("sort_key.LongestOutputFirst"),
    "random": PolicySpec("sort_key.Random"),
    # First come, first served within each priority, which ``WaitingQueue`` handles.
    "priority": PolicySpec("sort_key.FirstComeFirstServed", implies_priorities=True),
}
AUTO = "auto"
"""Choose by the mode in which the instance starts."""

if TYPE_CHECKING:
    SchedulePolicyName = str
else:
    SchedulePolicyName = Literal[(AUTO, *POLICIES)]
"""A name in ``POLICIES``. The command line shows and checks these choices; a type checker can't read them."""


def reads_cache(name: str) -> bool:
    """Return whether the policy ``name`` orders requests by their cached prefixes."""
    return name in POLICIES and POLICIES[name].reads_cache


def implies_priorities(name: str) -> bool:
    """Return whether the priorities of requests count with the policy ``name``."""
    return name in POLICIES and POLICIES[name].implies_priorities
