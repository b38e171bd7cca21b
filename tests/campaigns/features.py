"""What the load of a mixed campaign has beside plain hand-overs, and what happens to its instances."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """Probabilities and switches of a campaign. The default is the load of ``support.world.campaign``."""

    local: float = 0.0
    """Probability that an instance which gets a leg also gets a request of its own clients, without a hand-over."""
    priorities: bool = False
    """Requests have priorities, API keys and users."""
    forks: float = 0.0
    """Probability that a hand-over has further answers to its prompt."""
    deadlines: float = 0.0
    """Probability that a request has a short ``timeout_s``."""
    logprobs: float = 0.0
    """Probability that a request wants log-probabilities, of its prompt as well or of its output alone."""
    stops: float = 0.0
    """Probability that the detokenizer finds a stop string in an answer."""
    role_swaps: float = 0.0
    """Probability, for each hand-over, that all instances of a pair swap their roles as by ``POST /role``."""
    role_changes: float = 0.0
    """Probability, for each hand-over, that one instance gets any role, while it is sent the same legs as before."""
    flushes: float = 0.0
    """Probability, for each hand-over, that an instance gives up what it has cached, whatever is under way."""
    drains: float = 0.0
    """Probability, for each hand-over, that an instance drains, ends, and is started again."""
    bad_logits: float = 0.0
    """Probability that a step's logits are not finite for one of its requests."""


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
"""About as long as ``QUARTERS``, without shared prefixes."""
HALVES = Prompts((20, 80, 100, 120), longest=130)
"""Most prompts are half of a pool of 192 tokens or more: one request runs, and the others wait for it."""
