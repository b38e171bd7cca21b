"""Instances that exchange KV under virtual time, and their load: the parts that mixes are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

from support.sim import SimWindow
from support.sim_machine import Machine

from pdserve.scheduler import claims
from pdserve.scheduler.claims import STALL_SECONDS

from .features import PLAIN, QUARTERS, Features, Prompts
from .mixed_campaign import MixedCampaign

LONG_OUTPUTS = (3, 12, 30)
SHORT_OUTPUTS = (2, 4, 8)
UNLIKE_OUTPUTS = (1, 3, 12, 40)
ONE_PAIR = ("prefill", "decode")
POLICIES = ("fcfs", "srpf", "lpm", "dfs-weight", "lof", "random")
MACHINE = Machine(read_ms=0.4, token_ms=0.1, kv_token_ms=0.002, pair_ms=0.0005)
"""A step of a full pool takes a few milliseconds, as steps of the simulated world do."""
WINDOW = SimWindow(10, 64)
"""No more than four requests have enough window pages."""

ALL = Features(
    local=0.3,
    priorities=True,
    forks=0.2,
    deadlines=0.05,
    logprobs=0.2,
    stops=0.1,
    role_changes=0.05,
    flushes=0.05,
    drains=0.01,
    bad_logits=0.004,
)
"""Every feature, as often as a campaign of 150 hand-overs bears."""


class Report(NamedTuple):
    """What a campaign did that did not fail."""

    handovers: int
    outcomes: Counter[str]
    """How many legs ended in which way."""
    events: Counter[str]
    """What happened to instances."""
    longest_wait: float
    """Seconds of virtual time, from arrival to first token."""


class Mix(Protocol):
    """A kind of campaign; a seed makes it one campaign."""

    def play(self, seed: int, length: int | None = None) -> Report:
        """Play the campaign of a seed. ``length``: hand-overs, None: as many as a whole campaign has.

        Raises ``AssertionError`` where a rule is broken, or whatever the product raises.
        """


@dataclass(frozen=True)
class Instances:
    """Instances that exchange KV under virtual time (``MixedCampaign``), and their load."""

    modes: tuple[str, ...]
    features: Features = PLAIN
    prompts: Prompts | None = QUARTERS
    """None: short ones, as ``support.world`` draws them."""
    handovers: int = 60
    rate: float = 200.0
    """Hand-overs a second."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``Campaign``, and options of all instances."""
    stall_seconds: float = STALL_SECONDS
    """After how long reservations are asked back: with less than the product's second there are many withdrawals."""

    def play(self, seed: int, length: int | None = None) -> Report:
        """See ``Mix``."""
        handovers = length or self.handovers
        campaign = MixedCampaign(seed, self.modes, self.features, self.prompts, **self.rules)
        with patch.object(claims, "STALL_SECONDS", self.stall_seconds):
            campaign.run(handovers, self.rate)
        return Report(handovers, campaign.outcomes, campaign.events + campaign.faults, campaign.longest_wait())
