"""Makes the schedule policy that the options name."""

from __future__ import annotations

from importlib import import_module

from ..policy_registry import AUTO, POLICIES
from .base import PolicyNeeds, SchedulePolicy


def make_policy(needs: PolicyNeeds) -> SchedulePolicy:
    """Make the schedule policy that the options name.

    On a decode, ``auto`` is first come, first served: there, requests wait for memory rather than for the prompts
    before them. Elsewhere it is shortest remaining prefill first.
    """
    name = needs.options.schedule_policy
    if name == AUTO:
        name = "fcfs" if needs.options.disaggregation_mode == "decode" else "srpf"
    module, cls = POLICIES[name].path.split(".")
    policy: type[SchedulePolicy] = getattr(import_module(f".{module}", __package__), cls)
    return policy.make(needs)
