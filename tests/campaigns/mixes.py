"""The mixes: which instances, options and loads a campaign combines.

- ``burst-*``: 60 hand-overs at 200 a second, with prompts of about a quarter of the pool. Some request always waits for
  memory, and nothing else goes wrong.
- ``overload-*``: 150 hand-overs, faster than they can be served.
- One feature by itself, with a pair of roles (``*-pair``) and with equals (``*-equals``), at a bearable load.
- ``all-*``: every feature at once.
- ``any``: instances, options, features and load are drawn as well.
- ``tiers``: one instance with host memory and a store behind its pool, and everything but hand-overs.
"""

from __future__ import annotations

from typing import Any

from support.world.campaign import EQUALS, PAIR

from .drawn import Drawn
from .features import HALVES, PLAIN, QUARTERS, UNLIKE_QUARTERS, Features
from .instances import (
    ALL,
    LONG_OUTPUTS,
    MACHINE,
    ONE_PAIR,
    POLICIES,
    SHORT_OUTPUTS,
    UNLIKE_OUTPUTS,
    WINDOW,
    Instances,
    Mix,
)
from .tiered import Tiered

LOCAL = Features(local=0.3)
RANKED = Features(local=0.3, priorities=True)
WITH_PRIORITIES = {"enable_priority_scheduling": True, "outputs": LONG_OUTPUTS}
WITH_SHARES = {"fair_scheduling": True, "outputs": LONG_OUTPUTS}
ALL_ARRIVE = {"mishaps": False}
"""Without lost legs, for which others may have to wait, waits are short."""
SHORT = {"outputs": SHORT_OUTPUTS}


def bursts() -> dict[str, Instances]:
    """Return the mixes of full pools, by name."""
    both = WITH_PRIORITIES | WITH_SHARES
    mixes = {
        "burst-priorities": Instances(PAIR, RANKED, rules=WITH_PRIORITIES),
        "burst-priorities-shares-returned-kv": Instances(PAIR, RANKED, rules=both | {"return_kv": True}),
        "burst-shares": Instances(PAIR, RANKED, rules=WITH_SHARES),
        "burst-threshold-priorities": Instances(
            PAIR, Features(priorities=True), rules=WITH_PRIORITIES | {"disaggregation_threshold": "45"}
        ),
        "burst-role-swaps": Instances(ONE_PAIR, Features(role_swaps=0.06), UNLIKE_QUARTERS, rules=SHORT),
        "burst-one-pair": Instances(ONE_PAIR, PLAIN, UNLIKE_QUARTERS, rules=SHORT),
        "burst-two-equals": Instances(EQUALS[:2], PLAIN, UNLIKE_QUARTERS, 40, 300.0, SHORT),
        "burst-two-equals-at-once": Instances(EQUALS[:2], PLAIN, UNLIKE_QUARTERS, 12, 2000.0, SHORT),
        "burst-three-equals-at-once": Instances(EQUALS, PLAIN, UNLIKE_QUARTERS, 30, 1000.0, SHORT),
        "burst-three-equals-priorities": Instances(EQUALS, RANKED, rules=WITH_PRIORITIES),
        "overload-priorities": Instances(PAIR, RANKED, QUARTERS, 150, 150.0, WITH_PRIORITIES | ALL_ARRIVE),
        "overload-shares": Instances(PAIR, RANKED, QUARTERS, 150, 150.0, WITH_SHARES | ALL_ARRIVE),
        "burst-halves": Instances(PAIR, LOCAL, HALVES, 24, 100.0, {"outputs": LONG_OUTPUTS}),
        "burst-halves-priorities": Instances(PAIR, RANKED, HALVES, 24, 100.0, WITH_PRIORITIES),
        "burst-halves-equals": Instances(EQUALS, LOCAL, HALVES, 24, 100.0, {"outputs": LONG_OUTPUTS}),
        "burst-learned-costs": Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "machine": MACHINE}),
        "burst-learned-costs-equals": Instances(
            EQUALS,
            LOCAL,
            rules={"outputs": LONG_OUTPUTS, "machine": MACHINE, "disaggregation_threshold": "auto"},
        ),
        "burst-windows": Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "window": WINDOW}),
        "burst-resizes": Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "resizes": 25}),
        "burst-forks-deadlines": Instances(
            PAIR, Features(local=0.3, forks=0.3, deadlines=0.2), rules={"outputs": LONG_OUTPUTS}
        ),
    }
    for policy in POLICIES:
        mixes[f"burst-{policy}"] = Instances(PAIR, LOCAL, rules={"outputs": LONG_OUTPUTS, "schedule_policy": policy})
    return mixes


SINGLE: dict[str, tuple[Features, dict[str, Any]]] = {
    "priorities-shares": (
        Features(local=0.3, priorities=True),
        {"enable_priority_scheduling": True, "fair_scheduling": True},
    ),
    "forks": (Features(forks=0.3), {}),
    "deadlines": (Features(local=0.3, deadlines=0.2), {}),
    "logprobs": (Features(local=0.3, logprobs=0.5), {"outputs": UNLIKE_OUTPUTS, "moves": 30}),
    "local-stops": (Features(local=0.5, stops=0.3), {"outputs": UNLIKE_OUTPUTS}),
    "role-changes": (Features(role_changes=0.05), {}),
    "flushes": (Features(flushes=0.1), {}),
    "bad-logits": (Features(bad_logits=0.004), {}),
    "drains": (Features(drains=0.02), {"outputs": UNLIKE_OUTPUTS}),
    "threshold-auto": (Features(local=0.3), {"disaggregation_threshold": "auto", "machine": MACHINE}),
}
"""Features by themselves, with the rules that they need."""
ALL_RULES: dict[str, Any] = {
    "enable_priority_scheduling": True,
    "fair_scheduling": True,
    "return_kv": True,
    "moves": 30,
    "outputs": UNLIKE_OUTPUTS,
}


def combined(name: str, modes: tuple[str, ...]) -> dict[str, Instances]:
    """Return the mixes that are played with a pair and with equals; ``name`` is the end of theirs."""
    mixes = {
        f"{kind}-{name}": Instances(modes, features, None, 150, 20.0, rules)
        for kind, (features, rules) in SINGLE.items()
    }
    return mixes | {
        f"all-{name}": Instances(modes, ALL, None, 150, 20.0, ALL_RULES),
        f"all-faults-{name}": Instances(modes, ALL, None, 150, 15.0, ALL_RULES | {"faults": 4}),
        f"all-hostile-{name}": Instances(modes, ALL, None, 150, 15.0, ALL_RULES | {"faults": 4, "hostile": True}),
        f"all-windows-{name}": Instances(modes, ALL, None, 150, 20.0, ALL_RULES | {"window": WINDOW}),
        f"all-resizes-{name}": Instances(modes, ALL, None, 150, 20.0, ALL_RULES | {"resizes": 25}),
        f"all-threshold-{name}": Instances(
            modes, ALL, None, 150, 20.0, ALL_RULES | {"disaggregation_threshold": "auto", "machine": MACHINE}
        ),
        f"all-full-pools-{name}": Instances(modes, ALL, rules=ALL_RULES),
    }


def withdrawals() -> dict[str, Instances]:
    """Return mixes of instances that compute for each other and ask memory back from each other, by name."""
    ranked = {"enable_priority_scheduling": True, "outputs": LONG_OUTPUTS}

    def mix(features: Features = RANKED, modes: tuple[str, ...] = EQUALS, **rules: Any) -> Instances:
        return Instances(modes, features, QUARTERS, 60, 300.0, ranked | rules, stall_seconds=0.01)

    swapped = Features(local=0.2, priorities=True, role_swaps=0.1)
    return {
        "withdrawals-priorities": mix(),
        "withdrawals-moves-returned-kv": mix(moves=30, return_kv=True),
        "withdrawals-role-swaps": mix(swapped, ONE_PAIR),
        "withdrawals-windows": mix(window=WINDOW),
        "withdrawals-few-rows": mix(PLAIN, EQUALS[:2], max_running_requests=2),
        "withdrawals-resizes": mix(resizes=15),
        "withdrawals-choice": mix(disaggregation_threshold="auto"),
        "withdrawals-long-outputs": mix(PLAIN, outputs=(30, 60, 100), max_total_tokens=160),
    }


MIXES: dict[str, Mix] = {
    **bursts(),
    **withdrawals(),
    **combined("pair", PAIR),
    **combined("equals", EQUALS),
    "any": Drawn(),
    "tiers": Tiered(),
}
