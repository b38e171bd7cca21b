"""A mix that draws its instances, options, features and load, for untested combinations."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from support.sim import NO_WINDOW
from support.world.campaign import EQUALS, PAIR

from .features import HALVES, QUARTERS, Features
from .instances import ALL, LONG_OUTPUTS, MACHINE, ONE_PAIR, POLICIES, UNLIKE_OUTPUTS, WINDOW, Instances, Report

MODES = (PAIR, EQUALS, ONE_PAIR, EQUALS[:2], ("prefill", "unified", "decode"))
LOADS = ((None, 150, 20.0), (None, 150, 60.0), (QUARTERS, 60, 200.0), (QUARTERS, 60, 30.0), (HALVES, 24, 100.0))
"""Prompts, hand-overs, and hand-overs a second."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "schedule_policy": POLICIES,
    "enable_priority_scheduling": (False, True),
    "priority_scheduling_preemption_threshold": (0, 3, 10),
    "fair_scheduling": (False, True),
    "return_kv": (False, False, True),
    "disaggregation_threshold": ("always", "always", "auto", "12", "45"),
    "schedule_conservativeness": (0.0, 0.3, 1.0),
    "disable_overlap_schedule": (False, False, True),
    "disable_radix_cache": (False, False, False, True),
    "radix_eviction_policy": ("lru", "lfu", "slru", "mru", "priority"),
    "chunked_prefill_size": (4, 8, 32),
    "itl_budget_ms": (0, 0.35, 40),
    "max_running_requests": (3, 12),
    "kv_debug": (False, False, True),
    # Of the campaign itself.
    "outputs": ((1, 2, 3, 6, 12), LONG_OUTPUTS, UNLIKE_OUTPUTS),
    "faults": (0.0, 0.0, 4.0),
    "moves": (0.0, 30.0),
    "resizes": (0.0, 0.0, 25.0),
    "window": (NO_WINDOW, NO_WINDOW, WINDOW),
    "machine": (None, MACHINE),
    "lets_go": (False, True),
    "hostile": (False, False, True),
}
FEATURE_CHANCE = 0.4
"""Probability of each feature to be in a campaign."""


def draw(seed: int) -> Instances:
    """Return what the seed stands for."""
    rng = random.Random(seed)
    features = Features(
        **{f.name: getattr(ALL, f.name) for f in dataclasses.fields(Features) if rng.random() < FEATURE_CHANCE}
    )
    rules = {name: rng.choice(values) for name, values in OPTIONS.items()}
    prompts, handovers, rate = rng.choice(LOADS)
    return Instances(rng.choice(MODES), features, prompts, handovers, rate, rules)


class Drawn:
    """See the module."""

    def play(self, seed: int, length: int | None = None) -> Report:
        """See ``Mix``."""
        drawn = draw(seed)
        try:
            return drawn.play(seed, length)
        except Exception as e:
            e.add_note(str(drawn))
            raise
