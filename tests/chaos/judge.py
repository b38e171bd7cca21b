"""What is right and what is wrong about the answers of one episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from support.machine import stretched

from .faults import Fault, Kind
from .load import Answer

REQUEST_SECONDS = 10.0
"""Seconds within which a request ends that met a fault of a moment.

The pieces are in docs/disaggregation.md: a second to connect, 0.9 s of silence, 1.5 s of trying elsewhere, twice. The
rest is work beside an instance that starts.
"""
STALL_SECONDS = 5.0
EXCUSED = (502, 503, 504)
"""What a fault may turn an answer into."""


@dataclass
class Verdict:
    """Counts of requests during one fault. ``notes`` says why a request is wrong, late or stalled."""

    row: str
    fault: str
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    wrong: int = 0
    late: int = 0
    leaked: int = 0
    recovery: float = 0.0
    slowest_error: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, late or leaked."""
        return not (self.wrong or self.late or self.leaked or self.notes)


@dataclass(frozen=True)
class Episode:
    """When the fault began, when all instances were back, and when each of them had handed over or taken over again."""

    fault: Fault
    struck: float
    back: float
    serving: float


def judge(episode: Episode, answers: Sequence[Answer]) -> Verdict:
    """Judge an episode by its answers alone."""
    verdict = Verdict(episode.fault.row, str(episode.fault), requests=len(answers))
    verdict.recovery = episode.serving - episode.back
    errors: Counter[str] = Counter()
    for answer in answers:
        for note in complaints(episode, answer):
            verdict.wrong += 1
            verdict.notes.append(f"wrong: {note}; {described(episode, answer)}")
        for note in delays(episode, answer):
            verdict.late += 1
            verdict.notes.append(f"late: {note}; {described(episode, answer)}")
        if answer.error:
            errors[error_name(answer)] += 1
            verdict.slowest_error = max(verdict.slowest_error, answer.end - max(answer.asked, episode.struck))
        elif answer.reason == "abort":
            verdict.aborted += 1
        else:
            verdict.finished += 1
    verdict.errors = dict(errors)
    return verdict


def error_name(answer: Answer) -> str:
    """Return the column of the table for an error."""
    if answer.broken:
        return "connection"
    return str(answer.status) if answer.status != 200 else "stream"


def complaints(episode: Episode, answer: Answer) -> Iterator[str]:
    """Yield faults of an answer that nothing excuses."""
    count = len(answer.tokens)
    if count > answer.wanted or answer.tokens != answer.question.answer[:count]:
        right = next(
            (i for i, (a, b) in enumerate(zip(answer.tokens, answer.question.answer, strict=False)) if a != b), count
        )
        yield f"{count} of {answer.wanted} tokens, the first {right} are right"
    if answer.error:
        yield from unexcused(episode, answer)
    elif answer.status != 200 or not answer.done:
        yield "it ended without a word"
    elif answer.reason == "abort" and episode.fault.kind is not Kind.ABORT:
        yield "it was aborted without a request for that"
    elif answer.reason != "abort" and (count != answer.wanted or answer.reason != "length"):
        yield f"{count} of {answer.wanted} tokens, finished by {answer.reason!r}"


def unexcused(episode: Episode, answer: Answer) -> Iterator[str]:
    """Yield errors that should not have happened."""
    router_dies = episode.fault.kind is Kind.KILL and episode.fault.process == "router"
    if answer.broken and not router_dies:
        yield "its connection to the router broke"
    elif not answer.broken and answer.status not in (200, *EXCUSED):
        yield "no fault explains this status"
    elif answer.asked > episode.serving:
        yield "an error, though all instances served again"
    elif answer.end < episode.struck:
        yield "an error before the fault"


def delays(episode: Episode, answer: Answer) -> Iterator[str]:
    """Yield whether an answer took too long, or stood still when it should not have."""
    most = stretched(REQUEST_SECONDS + 2 * episode.fault.seconds)
    took = answer.end - max(answer.asked, episode.struck)
    if took > most:
        yield f"it took {took:.1f} s, of {most:.1f}"
    moments = [answer.asked, *answer.event_times, answer.end]
    gap = max((b - max(a, episode.back) for a, b in pairwise(moments)), default=0.0)
    if gap > stretched(STALL_SECONDS):
        yield f"no progress for {gap:.1f} s after all instances were back"


def described(episode: Episode, answer: Answer) -> str:
    """Describe one answer for people."""
    at = [
        f"{moment - episode.struck:+.2f}"
        for moment in (answer.asked, *answer.event_times[:1], *answer.event_times[-1:], answer.end)
    ]
    return (
        f"prompt {len(answer.question.prompt)}, {len(answer.tokens)} of {answer.wanted} tokens, "
        f"{'stream' if answer.streaming else 'whole'}, status {answer.status}, error {answer.error[:300]!r}; "
        f"asked, told first and last, ended {' '.join(at)} s from the fault; back {episode.back - episode.struck:+.2f}"
    )
