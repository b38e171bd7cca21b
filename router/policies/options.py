"""The options of routing policies."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.options import opt, section
from .registry import RoutingPolicyName


@section("Routing", order=6)
@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The choice of a routing policy, and the numbers that policies read."""

    policy: RoutingPolicyName = opt(
        default="least_load",
        help="How the instances that serve a request are chosen among those that can. docs/disaggregation.md has more.",
    )
    cache_threshold: float = opt(
        default=0.3,
        help=(
            "Smallest known share of a prompt, from 0 to 1, for which the policy cache_aware prefers the instance "
            "that has it."
        ),
    )
    balance_abs_threshold: int = opt(
        default=8,
        help=(
            "Requests that an instance may have more than the least loaded one, for the policies cache_aware and "
            "session. A request leaves it if --balance-rel-threshold is exceeded as well. The same holds for its work: "
            "256 prompt tokens count as a request, but it may have as much more as its cache can save."
        ),
    )
    balance_rel_threshold: float = opt(
        default=1.5,
        help="Factor by which an instance may have more requests or work than the least loaded one; see above.",
    )
    cache_table_blocks: int = opt(
        default=1 << 17,
        help=(
            "Blocks of 512 bytes of prompts that the policy cache_aware remembers. Each takes about 220 bytes of the "
            "router's memory, 450 at most."
        ),
    )

    def session_hash_key(self) -> bytes:
        """Return the key with which the policy session hashes; empty: it hashes without one, so all routers agree."""
        return b""
