"""The policies that ``--schedule-policy`` names."""

from __future__ import annotations

from ...runtime.options import ServerOptions
from ..estimates.cost_model import CostModel
from ..kv_memory import KVMemory
from .base import SchedulePolicy
from .by_key import FirstComeFirstServed, LongestOutputFirst, Random
from .by_prefix import HeaviestPrefixFirst, LongestPrefixMatch
from .by_remaining import ShortestRemainingFirst


def make_policy(options: ServerOptions, memory: KVMemory, model: CostModel) -> SchedulePolicy:
    """Return the policy that the options name.

    ``priority`` is first come, first served within each priority, which ``WaitingQueue`` handles. ``auto`` depends on
    the mode in which the instance starts: on a decode, requests wait for memory rather than for the prompts before
    them.
    """
    name = options.schedule_policy
    if name == "auto":
        name = "fcfs" if options.disaggregation_mode == "decode" else "srpf"
    if name == "lpm":
        return LongestPrefixMatch(memory)
    if name == "dfs-weight":
        return HeaviestPrefixFirst(memory)
    if name == "srpf":
        return ShortestRemainingFirst(memory, model)
    if name == "lof":
        return LongestOutputFirst()
    if name == "random":
        return Random(options.random_seed)
    return FirstComeFirstServed()
