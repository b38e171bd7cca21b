"""What was measured, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from .cases import Case
from .messages import MEMCPY, How, Way

GIGA, MILLI, GIB = 1e9, 1e3, 1 << 30


class Round(NamedTuple):
    """Seconds of one request in one round (the median of those that fit into it).

    ``unhashed``: without the sender's checksum, which only an engine computes; ``verify``: to hold the pages against it
    then, as the receiver does. Beside memcpy, that is just hashing.
    """

    move: float
    unhashed: float | None = None
    verify: float | None = None


class Figures(NamedTuple):
    """What is shown of one way to move one case. Medians over the rounds; ratios are taken within each round.

    Rates in GB/s (10⁹ bytes). ``checksum_ms``: what a sender takes longer by it, for each GiB; beside memcpy, what just
    hashing takes. None where there is no such thing, or it was not measured.
    """

    rate: float
    of_memcpy: float | None
    of_raw: float | None
    unhashed_rate: float | None
    checksum_ms: float | None
    verify_rate: float | None


@dataclass
class CaseResult:
    """``rounds``: of each way, of those that got through all of them."""

    case: Case
    rounds: dict[Way, list[Round]] = field(default_factory=dict)

    def figures(self, way: Way) -> Figures:
        """Return the figures of ``way``, which must be in ``rounds``: rates, and ratios to other ways."""
        own, nbytes = self.rounds[way], self.case.nbytes
        unhashed = [r.unhashed for r in own if r.unhashed is not None]
        verify = [r.verify for r in own if r.verify is not None]
        extra = verify if way == MEMCPY else [r.move - r.unhashed for r in own if r.unhashed is not None]
        return Figures(
            rate=nbytes / median(r.move for r in own) / GIGA,
            of_memcpy=None if way == MEMCPY else self._ratio(way, MEMCPY),
            of_raw=self._ratio(way, Way(How.RAW, way.backend)) if way.how is How.ENGINE else None,
            unhashed_rate=nbytes / median(unhashed) / GIGA if unhashed else None,
            checksum_ms=median(extra) * MILLI * GIB / nbytes if extra else None,
            verify_rate=nbytes / median(verify) / GIGA if verify else None,
        )

    def _ratio(self, way: Way, other: Way) -> float | None:
        """Return the speed of ``way`` as a multiple of that of ``other``: the median over the rounds.

        None if ``other`` was not measured in all of them.
        """
        if other not in self.rounds:
            return None
        pairs = zip(self.rounds[way], self.rounds[other], strict=True)
        return median(theirs.move / ours.move for ours, theirs in pairs)


@dataclass
class TransferResults:
    """``left_out`` and ``failed``: by the name of what is not, or not wholly, in ``cases``: why."""

    cases: list[CaseResult] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
