"""The mixes: which instances, options and loads a campaign combines.

A *burst* is 60 hand-overs at 200 a second, with prompts of about a quarter of the pool: there is always somebody who
waits for memory, and nothing else goes wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from support.sim_machine import Machine
from support.world.campaign import EQUALS, PAIR

from .features import PLAIN, QUARTERS, UNLIKE_QUARTERS, Features, Prompts
from .mixed_campaign import MixedCampaign

LONG_OUTPUTS = (3, 12, 30)
SHORT_OUTPUTS = (2, 4, 8)
ONE_PAIR = ("prefill", "decode")
POLICIES = ("fcfs", "srpf", "lpm", "dfs-weight", "lof", "random")
MACHINE = Machine(read_ms=0.4, token_ms=0.1, kv_token_ms=0.002, pair_ms=0.0005)
"""A step of a full pool takes a few milliseconds, as steps of the simulated world do."""


class Report(NamedTuple):
    """What a campaign did that did not fail."""

    handovers: int
    outcomes: Counter[str]
    """How many legs ended in which way."""
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
    handovers: int = 60
    rate: float = 200.0
    rules: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``Campaign``, and options of all instances."""

    def play(self, seed: int, length: int | None = None) -> Report:
        """See ``Mix``."""
        handovers = length or self.handovers
        campaign = MixedCampaign(seed, self.modes, self.features, self.prompts, **self.rules)
        campaign.run(handovers, self.rate)
        return Report(handovers, campaign.outcomes, campaign.longest_wait())


LOCAL = Features(local=0.3)
RANKED = Features(local=0.3, priorities=True)
WITH_PRIORITIES = {"enable_priority_scheduling": True, "outputs": LONG_OUTPUTS}
WITH_SHARES = {"fair_scheduling": True, "outputs": LONG_OUTPUTS}


def bursts() -> dict[str, Instances]:
    """Return the mixes of full pools, by name."""
    mixes = {
        "burst-priorities": Instances(PAIR, RANKED, rules=WITH_PRIORITIES),
        "burst-priorities-shares-returned-kv": Instances(
            PAIR, RANKED, rules=WITH_PRIORITIES | WITH_SHARES | {"return_kv": True}
        ),
        "burst-shares": Instances(PAIR, RANKED, rules=WITH_SHARES),
        "burst-threshold-priorities": Instances(
            PAIR, Features(priorities=True), rules=WITH_PRIORITIES | {"disaggregation_threshold": "45"}
        ),
        "burst-role-swaps": Instances(
            ONE_PAIR, Features(role_swaps=0.06), UNLIKE_QUARTERS, rules={"outputs": SHORT_OUTPUTS}
        ),
        "burst-one-pair": Instances(ONE_PAIR, PLAIN, UNLIKE_QUARTERS, rules={"outputs": SHORT_OUTPUTS}),
        "burst-two-equals": Instances(EQUALS[:2], PLAIN, UNLIKE_QUARTERS, 40, 300.0, {"outputs": SHORT_OUTPUTS}),
        "burst-two-equals-at-once": Instances(
            EQUALS[:2], PLAIN, UNLIKE_QUARTERS, 12, 2000.0, {"outputs": SHORT_OUTPUTS}
        ),
        "burst-three-equals-at-once": Instances(EQUALS, PLAIN, UNLIKE_QUARTERS, 30, 1000.0, {"outputs": SHORT_OUTPUTS}),
        "burst-three-equals-priorities": Instances(EQUALS, RANKED, rules=WITH_PRIORITIES),
        "burst-learned-costs": Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "machine": MACHINE}),
    }
    for policy in POLICIES:
        mixes[f"burst-{policy}"] = Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "schedule_policy": policy})
    return mixes


MIXES: dict[str, Mix] = {**bursts()}
