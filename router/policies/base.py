"""A routing policy chooses the instances that serve a request, and hears of what becomes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..facts import Facts
    from ..instance import Instance
    from ..targets import Offer, Target
    from .options import PolicyOptions


class Ending(Enum):
    """How an attempt ended."""

    ANSWERED = auto()
    """The answer is complete."""
    FAILED = auto()
    """An instance failed or refused, or the stream had an error event. Another attempt may follow."""
    CANCELLED = auto()
    """The client left, or the router ends."""


class Policy(ABC):
    """Chooser of both legs of requests. A router has one object of it, and uses it on its event loop alone.

    Calls must be short, and never wait. ``Facts`` describe the request. The counts of an ``Instance`` (``answers``,
    ``prompt_tokens``, ``running``) are of what this router sent. Its ``report`` is what the instance says itself. A
    policy may keep state, which is lost when the router ends. It keeps no ``Instance`` after ``left``, and its memory
    has a limit.

    ``LegPolicy`` is for policies that choose each leg by itself.
    """

    def __init__(self, options: PolicyOptions) -> None:  # noqa: B027
        """Make the policy of a router with these ``options``."""

    @abstractmethod
    def choose(self, offer: Offer, facts: Facts) -> Target:
        """Return a pair of instances in ``offer``, or one that serves the whole request.

        The choice for a retry is a call of its own. A pair passes through ``load.relieved``, which may leave its
        prefill alone.
        """

    def sent(self, target: Target, facts: Facts) -> None:  # noqa: B027
        """Note that the request is sent to ``target``: directly after the choice, before the next one."""

    def began(self, target: Target, facts: Facts) -> None:  # noqa: B027
        """Note that the instances of ``target`` have begun to answer with success.

        It is called at most once for each attempt, between ``sent`` and ``ended``. Until then, an instance may still
        refuse the request. If the request has moved, ``target`` is still the instances that it was sent to.
        """

    def ended(self, target: Target, facts: Facts, ending: Ending) -> None:  # noqa: B027
        """Note the end of an attempt that ``sent`` began. It is called exactly once for each.

        If the request has moved, ``target`` is still the instances that it was sent to.
        """

    def joined(self, instance: Instance) -> None:  # noqa: B027
        """Note that ``instance`` can be sent requests. Its caches may be empty."""

    def left(self, instance: Instance) -> None:  # noqa: B027
        """Note that ``instance`` is gone, or is about to be started anew. ``joined`` is called if it comes back.

        Attempts that were sent there may end later.
        """
