"""Rules that hold throughout a campaign, beside those that ``support.world`` checks.

``support.world`` checks every token and log-probability against the reference, and every page and pin against its
owners. It also checks that a request ends once, that it ends at all, and that everything was given back at the end. A
judge here looks at instances after each turn of their scheduler's loop.

To add a rule, derive from ``Judge`` and add the class to ``JUDGES``.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Protocol

from support.world.campaign import TOO_LONG
from support.world.node import Node
from support.world.world import Violation, World

from pdserve.messages.requests import GenerateReq

STANDSTILL_SECONDS = 15.0
"""Seconds without progress that count as a standstill.

No campaign without faults waits that long: a leg that lost its other leg takes 5 s.
"""
IDLE_SECONDS = 2.0
"""Turns come every 0.3 s at least: what is free is given away in the next one."""
FIRST_SECONDS = 2.0
"""The first claim may wait for the compute budget of a few steps."""
LOOK_SECONDS = 0.25
LONGEST_TURN = 1.0
"""Seconds between two turns. An instance that hangs for longer can't give anything away."""
SPARE_SECONDS = 2.0
"""Seconds that a wait may take longer, for slow messages and for reservations that are given back after a second."""
LEG_SECONDS = 0.02
"""Seconds of a request without its steps: it is sent, linked, handed over and checked."""
STEP_SECONDS = 0.004
"""Seconds of a step of the simulated world, on average, with what is computed again after a retraction."""
TOKENS_A_STEP = 8
LOST_SECONDS = 6.0
"""Seconds after which a leg that lost its other leg is given up."""
LOST = ("one leg", "a room used twice", TOO_LONG)
"""Fates of legs that wait for another leg in vain."""


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

    def fate(self, node: Node, rid: str) -> str:
        """Return what was done to a request that may fail it, "" for nothing."""


class Judge:
    """A rule. Its methods raise ``Violation`` where it is broken; each does nothing by default."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def arrives(self, node: Node, msg: GenerateReq) -> None:
        """Look at an instance before it takes a request in."""

    def after_turn(self, node: Node) -> None:
        """Look at an instance after a turn of its scheduler's loop."""

    def at_end(self) -> None:
        """Look at the whole campaign after the last request has ended."""


class NoStandstill(Judge):
    """While requests are open, some instance computes or ends something within ``STANDSTILL_SECONDS``.

    A circular wait would otherwise show only when the first of its requests runs into a timeout. The others then go on
    as if nothing had been.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._seen: tuple[int, ...] = ()
        self._since = 0.0

    def after_turn(self, node: Node) -> None:
        """See ``Judge``."""
        nodes, now = self.case.nodes, self.case.world.now
        steps = sum(n.scheduler.completed_step for n in nodes)
        tokens = sum(len(listed) for n in nodes for listed in n.tokens.values())
        seen = (len(nodes), steps, tokens, len(self.case.world.ends))
        if seen != self._seen or not self.case.is_calm:
            self._seen, self._since = seen, now
        elif now - self._since > STANDSTILL_SECONDS and (waiting := self.case.untouched()):
            states = "; ".join(state_of(n) for n in nodes)
            raise Violation(f"nothing has moved for {STANDSTILL_SECONDS:.0f} s, {len(waiting)} requests wait: {states}")


class Turns:
    """Measures for how long something has been the case at an instance, tick by tick.

    An instance that hangs, or that has a hanging worker, can't change anything: the time begins anew then.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._since: dict[str, tuple[object, float]] = {}

    def is_due(self, node: Node) -> bool:
        """Return whether the last look at the instance was ``LOOK_SECONDS`` ago. Looks cost as much as a turn does."""
        return node.world.now - self._last.get(node.epoch, 0.0) >= LOOK_SECONDS

    def seconds(self, node: Node, what: object) -> float:
        """Return for how long ``what`` has been the case, as was said at each look. None: nothing is."""
        now, sent = node.world.now, node.scheduler.in_flight_since
        hung = now - self._last.get(node.epoch, now) > LONGEST_TURN or (sent is not None and now - sent > LONGEST_TURN)
        self._last[node.epoch] = now
        before, since = self._since.get(node.epoch, (None, now))
        if hung or what is None or what != before:
            self._since[node.epoch] = what, now
            return 0.0
        return now - since


class MemoryLeftIdle(Judge):
    """An instance with all of its memory available gives some to a waiting request within ``IDLE_SECONDS``.

    This holds whatever the order of claims is.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._turns = Turns()

    def after_turn(self, node: Node) -> None:
        """See ``Judge``."""
        if not self._turns.is_due(node):
            return
        memory, waiting = node.scheduler.memory, node.scheduler.planner.waiting
        is_free = memory.pool.obtainable >= memory.pool.max_total_tokens and node.scheduler.in_flight_since is None
        is_idle = is_free and any(not req.pending for req in waiting.values())
        if self._turns.seconds(node, is_idle or None) > IDLE_SECONDS:
            raise Violation(f"all memory has been free for {IDLE_SECONDS:.0f} s: {state_of(node)}")


class FirstClaimIsServed(Judge):
    """The first claim for memory gets it within ``FIRST_SECONDS`` once what is obtainable covers its need."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._turns = Turns()

    def after_turn(self, node: Node) -> None:
        """See ``Judge``."""
        if not self._turns.is_due(node):
            return
        scheduler = node.scheduler
        claims = scheduler.planner.claims
        first = claims.first(scheduler.now)
        is_covered = first is not None and scheduler.memory.headroom.could_admit(first, claims.reserve(first))
        if self._turns.seconds(node, first.rid if first is not None and is_covered else None) > FIRST_SECONDS:
            assert first is not None
            what = f"{first.rid}, a claim of {first.known_len} tokens, is first and would fit"
            raise Violation(f"{what}, and has waited for {FIRST_SECONDS:.0f} s: {state_of(node)}")


class WaitsAreBounded(Judge):
    """A request waits no longer than the work that is ahead of it takes, one request after the other.

    Ahead are requests of at least its priority that live while it waits, at any instance, and those of lower priority
    that run when it comes. What a lost leg of a hand-over holds is free only after a timeout. It counts at every
    instance: hand-overs that wait for that memory hold up others elsewhere. Instances that wait for each other compute
    nothing until a reservation is given back, which is seen when it is.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._asked_back: dict[str, dict[str, float]] = {}
        """Reservations of each instance that were asked back when it was last seen, with their patience."""
        self._standoffs: list[tuple[float, float]] = []
        """When instances may have waited for each other."""
        self._came: dict[tuple[str, str], tuple[float, GenerateReq]] = {}

    def arrives(self, node: Node, msg: GenerateReq) -> None:
        """See ``Judge``."""
        self._came[node.epoch, msg.rid] = node.world.now, msg

    def after_turn(self, node: Node) -> None:
        """See ``Judge``."""
        now, held = node.world.now, node.scheduler.planner.claims.reservations
        for rid, patience in self._asked_back.get(node.epoch, {}).items():
            if rid not in held:
                self._standoffs.append((now - patience - LONGEST_TURN, now))
        self._asked_back[node.epoch] = {rid: one.patience for rid, one in held.items() if one.asked_back}

    def at_end(self) -> None:
        """See ``Judge``."""
        if not self.case.is_calm:
            return
        lives = [life for node in self.case.nodes for rid in node.waits if (life := self._life(node, rid)) is not None]
        for life in lives:
            if life.fate:
                continue
            where = {other.epoch for other in lives if other.rid == life.rid}
            ahead = [
                other for other in lives if (other.epoch in where or other.fate in LOST) and other.is_ahead_of(life)
            ]
            bound = SPARE_SECONDS + sum(other.seconds for other in ahead) + self._standoff(life.came, life.served)
            if life.served - life.came > bound:
                waited = f"waited for {life.served - life.came:.2f} s"
                raise Violation(f"{life.epoch}: {life.rid} {waited}, the work ahead of it takes {bound:.2f} s at most")

    def _standoff(self, begin: float, end: float) -> float:
        """Return for how many seconds of this time instances may have waited for each other."""
        seconds = 0.0
        for since, until in sorted(self._standoffs):
            begin = max(begin, since)
            if begin < min(until, end):
                seconds += min(until, end) - begin
                begin = until
        return seconds

    def _life(self, node: Node, rid: str) -> Life | None:
        if (node.epoch, rid) not in self._came:
            return None  # it came by a move
        came, msg = self._came[node.epoch, rid]
        fate = self.case.fate(node, rid)
        leg = msg.bootstrap.leg if msg.bootstrap is not None else ""
        steps = 0.0 if leg == "decode" else len(msg.input_ids) / 4 / TOKENS_A_STEP
        steps += 0 if leg == "prefill" else msg.sampling.max_new_tokens
        seconds = LEG_SECONDS + steps * STEP_SECONDS + (LOST_SECONDS if fate in LOST else 0.0)
        rank = msg.priority if node.options.enable_priority_scheduling else 0
        return Life(node.epoch, rid, rank, came, came + node.waits[rid], node.ended_at[rid], seconds, fate)


class Life(NamedTuple):
    """A leg of a request, or a request without a hand-over. Times are those of the world."""

    epoch: str
    rid: str
    priority: int
    came: float
    served: float
    """When it got its first token."""
    ended: float
    seconds: float
    """How long it takes by itself."""
    fate: str

    def is_ahead_of(self, other: Life) -> bool:
        """Return whether ``other`` may have to wait for it."""
        if self.ended <= other.came or self.came >= other.served:
            return False
        return self.priority >= other.priority or self.served <= other.came


def state_of(node: Node) -> str:
    """Return where an instance's requests stand, and how much memory there is, in one line."""
    scheduler = node.scheduler
    kinds = Counter(
        f"{req.route} {req.state}{' with memory' if req.hold is not None else ''}" for req in scheduler.reqs.values()
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    obtainable, most = scheduler.memory.pool.obtainable, scheduler.memory.pool.max_total_tokens
    return f"{node.epoch} ({scheduler.role}) has {obtainable} of {most} tokens, {listed or 'idle'}"


JUDGES: tuple[type[Judge], ...] = (NoStandstill, MemoryLeftIdle, FirstClaimIsServed, WaitsAreBounded)
"""Rules that every campaign is held to."""
