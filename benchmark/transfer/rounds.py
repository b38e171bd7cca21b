"""Every way of moving bytes takes its turn in every round: what the machine does meanwhile meets them all alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from rich.console import Console

from .cases import Case, PageLists, cases_of, pages_of
from .contestant import Contestant, LeftOut
from .messages import MEMCPY, How, Way
from .options import HostBackendName, TransferBenchOptions
from .pools import SharedPools
from .process import SideError
from .results import CaseResult, Round, TransferResults

LIBRARIES = ("nixl", "mooncake")
"""Backends with a library that can also be measured alone."""


def ways_of(backends: list[HostBackendName]) -> list[Way]:
    """Return the ways to measure: a plain copy, each backend, and the library alone of those in ``LIBRARIES``."""
    ways = [MEMCPY]
    for name in backends:
        ways.append(Way(How.ENGINE, name))
        if name in LIBRARIES:
            ways.append(Way(How.RAW, name))
    return ways


class TransferBench:
    """Measures what ``options`` ask for. ``results`` fills while it does; ``notes`` hears how far it is."""

    def __init__(self, options: TransferBenchOptions, notes: Console) -> None:
        self.results = TransferResults()
        self._options = options
        self._notes = notes

    def run(self) -> Iterator[list[CaseResult]]:
        """Measure every case; after each page size, add its results to ``results`` and yield them.

        Raises ``RegionError``.
        """
        for page_bytes in self._options.page_bytes:
            cases = cases_of(self._options, page_bytes)
            pool_pages = max(case.num_pages for case in cases) + 1
            with ExitStack() as ending:
                pools = ending.enter_context(SharedPools(page_bytes, pool_pages))
                contestants = self._start(pools, ending)
                done = [self._measure(case, pages_of(case, pool_pages), contestants) for case in cases]
            self.results.cases += done
            yield done

    def _start(self, pools: SharedPools, ending: ExitStack) -> list[Contestant]:
        contestants: list[Contestant] = []
        for way in ways_of(self._options.backends):
            if way.backend in self.results.left_out:
                continue
            try:
                contestants.append(ending.enter_context(Contestant(way, pools)))
            except LeftOut as e:
                self.results.left_out[way.backend] = str(e)
            except SideError as e:
                self.results.failed[way.label] = str(e)
        return contestants

    def _measure(self, case: Case, pages: PageLists, contestants: list[Contestant]) -> CaseResult:
        """Measure one case in rounds, and return the results of the contestants that got through all of them.

        A contestant that fails is closed, and taken out of ``contestants``.
        """
        self._notes.print(f"[dim]{case.page_bytes:,}-byte pages, {case.request_mib:g} MiB {case.contiguity}[/dim]")
        rounds: dict[Way, list[Round]] = {contestant.way: [] for contestant in contestants}
        for number in range(-1, self._options.rounds):
            # Each round begins with another, so that none always follows the same.
            for contestant in _rotated(contestants, number):
                try:
                    if number < 0:
                        contestant.prepare(pages)
                    else:
                        rounds[contestant.way].append(contestant.measure(self._options.seconds))
                except SideError as e:
                    self.results.failed[contestant.way.label] = str(e)
                    contestants.remove(contestant)
                    contestant.close()
        return CaseResult(case, {contestant.way: rounds[contestant.way] for contestant in contestants})


def _rotated(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Return a copy of ``contestants`` that begins at index ``number``, modulo their count; at 0 for a negative one."""
    at = max(number, 0) % max(len(contestants), 1)
    return contestants[at:] + contestants[:at]
