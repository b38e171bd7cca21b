"""Kinds of faults, and the list of faults that a seed stands for."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

PREFILLS = ("prefill1", "prefill2")
DECODES = ("decode1", "decode2")
ROUTER = "router"
CHILDREN = ("supervisor", "worker", "scheduler", "http", "tokenizer", "detokenizer")
BOOTSTRAP = "bootstrap"
"""A child that others ask of a prefill only."""
FREEZE_SECONDS = (0.3, 3.0)
CUT_SECONDS = (0.3, 4.0)
LEAD_SECONDS = (0.2, 1.2)
"""How long the load runs before the fault: it shall not always meet the same part of a request."""


class Kind(Enum):
    """What is done; a value is the row of the table, ``{}`` stands for the process."""

    KILL = "kill -9: {}"
    FREEZE = "frozen: one process"
    FREEZE_INSTANCE = "frozen: whole instance"
    FREEZE_ROUTER = "frozen: router"
    LEAVE = "hundreds of clients leave"
    ABORT = "hundreds of requests aborted"
    RESET = "connections between two instances reset"
    LOSE = "packets between two instances lost"
    UNPLUG = "an instance's cable pulled"
    SLOW = "an instance's cable slow and lossy"
    WRITE_WRONG = "a prefill writes wrong pages"
    WRITE_TWICE = "a prefill writes everything twice"
    WRITE_LATE = "a prefill's writes are late"


LINKS = frozenset({Kind.RESET, Kind.LOSE, Kind.UNPLUG, Kind.SLOW})
"""Faults that need hosts of their own."""
WRITES = {Kind.WRITE_WRONG: "another page", Kind.WRITE_TWICE: "twice", Kind.WRITE_LATE: "reported late"}
"""What the prefill's backend is told."""
LASTING = frozenset({Kind.FREEZE, Kind.FREEZE_INSTANCE, Kind.FREEZE_ROUTER, Kind.LOSE, Kind.UNPLUG, Kind.SLOW, *WRITES})


@dataclass(frozen=True)
class Fault:
    """One fault: after ``lead`` seconds of load it strikes ``victim`` and lasts ``seconds`` (0: a moment)."""

    kind: Kind
    victim: str
    process: str = ""
    peer: str = ""
    lead: float = 0.0
    seconds: float = 0.0

    @property
    def row(self) -> str:
        """Return the row of the table that the fault counts in."""
        return self.kind.value.format(self.process)

    def __str__(self) -> str:
        """Describe the fault in one line."""
        parts = [self.row, self.victim]
        if self.process and self.kind is not Kind.KILL:
            parts.append(self.process)
        if self.peer:
            parts.append(f"and {self.peer}")
        return " ".join(parts) + (f" for {self.seconds:.1f} s" if self.seconds else "")


def deck() -> list[tuple[Kind, str]]:
    """Return every row of the table once."""
    kills = [(Kind.KILL, process) for process in (*CHILDREN, BOOTSTRAP, ROUTER)]
    return kills + [(kind, "") for kind in Kind if kind is not Kind.KILL]


def drawn(seed: int, count: int, without: Collection[Kind] = ()) -> list[Fault]:
    """Draw ``count`` faults, the same for the same arguments. Each row of the table comes about equally often."""
    rng = random.Random(seed)
    rows = (row for row in _shuffled_for_ever(rng) if row[0] not in without)
    return [_drawn(rng, kind, process) for _, (kind, process) in zip(range(count), rows, strict=False)]


def _shuffled_for_ever(rng: random.Random) -> Iterator[tuple[Kind, str]]:
    while True:
        rows = deck()
        rng.shuffle(rows)
        yield from rows


def _drawn(rng: random.Random, kind: Kind, process: str) -> Fault:
    prefill, decode = rng.choice(PREFILLS), rng.choice(DECODES)
    victim, peer = rng.choice((prefill, decode)), ""
    if process == BOOTSTRAP or kind in WRITES:
        victim = prefill
    if process == ROUTER or kind in (Kind.FREEZE_ROUTER, Kind.LEAVE, Kind.ABORT):
        victim = ROUTER
    if kind in (Kind.RESET, Kind.LOSE):
        victim, peer = prefill, decode
    if kind is Kind.FREEZE:
        process = rng.choice((*CHILDREN, BOOTSTRAP) if victim in PREFILLS else CHILDREN)
    longest = FREEZE_SECONDS if kind not in LINKS else CUT_SECONDS
    seconds = rng.uniform(*longest) if kind in LASTING else 0.0
    return Fault(kind, victim, process, peer, rng.uniform(*LEAD_SECONDS), seconds)
