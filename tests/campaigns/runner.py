"""Plays campaigns and keeps the counts."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .instances import Mix


@dataclass(frozen=True)
class Failure:
    """A campaign that broke a rule."""

    mix: str
    seed: int
    what: str
    """The exception, and where it was raised."""

    @property
    def command(self) -> str:
        """What plays this campaign again."""
        return f'make campaigns CAMPAIGNS="--mix {self.mix} --seed {self.seed} --count 1"'

    def __str__(self) -> str:
        return f"FAILED {self.mix}, seed {self.seed}: {self.what}\n  {self.command}"


@dataclass
class Tally:
    """Counts of a mix."""

    campaigns: int = 0
    handovers: int = 0
    longest_wait: float = 0.0
    """Seconds of virtual time; of campaigns that did not fail."""
    seconds: float = 0.0
    """Time that it took here."""
    outcomes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts of ``other``."""
        self.campaigns += other.campaigns
        self.handovers += other.handovers
        self.longest_wait = max(self.longest_wait, other.longest_wait)
        self.seconds += other.seconds
        self.outcomes += other.outcomes
        self.events += other.events
        self.failures += other.failures


def play(name: str, mix: Mix, seed: int, tally: Tally) -> Failure | None:
    """Play one campaign, and count it; returns its failure."""
    begin = time.monotonic()
    tally.campaigns += 1
    failure = None
    try:
        report = mix.play(seed)
    except Exception as e:  # noqa: BLE001
        # Whatever a campaign raises is its result, and the next one is played.
        failure = Failure(name, seed, described(e))
        tally.failures.append(failure)
    else:
        tally.handovers += report.handovers
        tally.outcomes += report.outcomes
        tally.events += report.events
        tally.longest_wait = max(tally.longest_wait, report.longest_wait)
    tally.seconds += time.monotonic() - begin
    return failure


def described(error: Exception) -> str:
    """Return an exception's kind, text and place in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:600]}{notes}"


def table(tallies: Iterable[tuple[str, Tally]]) -> str:
    """Return the counts by mix as lines of text."""
    lines = [f"{'mix':38} {'campaigns':>9} {'hand-overs':>10} {'failures':>8} {'longest wait':>12} {'seconds':>8}"]
    for name, tally in tallies:
        lines.append(
            f"{name:38} {tally.campaigns:9} {tally.handovers:10} {len(tally.failures):8} "
            f"{tally.longest_wait:10.2f} s {tally.seconds:8.1f}"
        )
    return "\n".join(lines)


def silence() -> None:
    """Log nothing: a simulated world loses more peers than a log has lines."""
    logging.getLogger("pdserve").setLevel(logging.CRITICAL)
