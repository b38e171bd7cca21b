"""What the load of a mixed campaign has beside plain hand-overs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """Probabilities and switches of a campaign's load. The default is that of ``support.world.campaign``."""

    local: float = 0.0
    """Probability that an instance which gets a leg also gets a request of its own clients, without a hand-over."""
    priorities: bool = False
    """Requests have priorities, API keys and users."""
    role_swaps: float = 0.0
    """Probability, for each hand-over, that all instances of a pair swap their roles as by ``POST /role``."""


PLAIN = Features()


@dataclass(frozen=True)
class Prompts:
    """Lengths of prompts, in tokens. None of the campaigns' pools holds less than 104 tokens."""

    own: tuple[int, ...]
    """Tokens of a prompt's own."""
    shared: tuple[int, ...] = ()
    """Tokens that a prompt may share with an earlier one, before its own."""
    sharing: float = 0.0
    """Probability that it does."""
    longest: int = 60


QUARTERS = Prompts((20, 30, 40, 45, 50), shared=(8, 16, 24), sharing=0.3)
"""About a quarter of a pool of 192 tokens: four requests fill it."""
UNLIKE_QUARTERS = Prompts((30, 40, 45, 50))
"""The same without shared prefixes."""
