"""Rules that hold throughout a campaign, beside those that ``support.world`` checks.

``support.world`` checks every token against the reference, every page and pin against its owners, that a request ends
once, that it ends at all, and that everything was given back at the end. A judge here looks at instances after each
turn of their scheduler's loop.

To add a rule about the order of admission, write a ``Judge`` and add it to ``make_judges``. Rules that are planned:

- The first request that is eligible for memory never waits while the obtainable memory covers its need.
- Each wait is bounded by the work that was ahead of it when it began.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from support.world.node import Node
from support.world.world import Violation, World

STANDSTILL_SECONDS = 15.0
"""Longer than anything that a campaign without faults waits for: a leg whose other leg was lost takes 5 s."""


class Case(Protocol):
    """What a judge sees of a campaign."""

    world: World

    @property
    def is_calm(self) -> bool:
        """Whether nothing has gone wrong so far that may fail or delay a request."""

    @property
    def nodes(self) -> list[Node]:
        """Living instances."""

    def untouched(self) -> list[str]:
        """Return the names of open requests to which nothing was done that may fail them."""


class Judge(Protocol):
    """A rule. Raises ``Violation`` where it is broken."""

    def after_turn(self, node: Node) -> None:
        """Look at an instance after a turn of its scheduler's loop."""

    def at_end(self) -> None:
        """Look at the whole campaign after the last request has ended."""


class NoStandstill:
    """Requests are open, and no instance has computed or ended anything for ``STANDSTILL_SECONDS``.

    A wait in a circle would otherwise show only when the first of its requests runs into a timeout, and the others go
    on as if nothing had been.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._seen: tuple[int, ...] = ()
        self._since = 0.0

    def after_turn(self, node: Node) -> None:
        """See ``Judge``."""
        nodes, now = self._case.nodes, self._case.world.now
        steps = sum(n.scheduler.completed_step for n in nodes)
        tokens = sum(len(told) for n in nodes for told in n.tokens.values())
        seen = (len(nodes), steps, tokens, len(self._case.world.ends))
        if seen != self._seen or not self._case.is_calm:
            self._seen, self._since = seen, now
        elif now - self._since > STANDSTILL_SECONDS and (waiting := self._case.untouched()):
            states = "; ".join(state_of(n) for n in nodes)
            raise Violation(f"nothing has moved for {STANDSTILL_SECONDS:.0f} s, {len(waiting)} requests wait: {states}")

    def at_end(self) -> None:
        """See ``Judge``."""


def state_of(node: Node) -> str:
    """Return where an instance's requests stand, and how much memory there is, in one line."""
    scheduler = node.scheduler
    kinds = Counter(
        f"{req.route} {req.state}{' with memory' if req.hold is not None else ''}" for req in scheduler.reqs.values()
    )
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    memory = scheduler.memory
    return (
        f"{node.epoch} ({scheduler.role}) has {memory.obtainable} of {memory.max_total_tokens} tokens, {told or 'idle'}"
    )


def make_judges(case: Case) -> list[Judge]:
    """Return the rules that every campaign is held to."""
    return [NoStandstill(case)]
