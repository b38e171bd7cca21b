"""Makes the routing policy that the options name."""

from __future__ import annotations

from importlib import import_module

from .base import Policy
from .options import PolicyOptions
from .registry import POLICIES


def make_policy(options: PolicyOptions) -> Policy:
    """Import the class that ``POLICIES`` has for ``options.policy``, and return a new object of it.

    Raises ``KeyError`` for an unknown name.
    """
    module, cls = POLICIES[options.policy].split(".")
    policy: type[Policy] = getattr(import_module(f".{module}", __package__), cls)
    return policy(options)
