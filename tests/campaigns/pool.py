"""Plays campaigns in several processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from multiprocessing import get_context

from .mixes import MIXES
from .runner import Tally, play, silence


def played(name: str, seed: int) -> tuple[str, Tally]:
    """Play one campaign in a process of the pool; return its mix and its counts."""
    tally = Tally()
    play(name, MIXES[name], seed, tally)
    return name, tally


def results(drawn: Iterable[tuple[str, int]], workers: int, ends_at: float) -> Iterator[tuple[str, Tally]]:
    """Play the ``drawn`` campaigns, one for each worker at a time, and yield the counts of each as it ends."""
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=silence) as pool:
        running: set[Future[tuple[str, Tally]]] = set()
        for name, seed in drawn:
            if time.monotonic() > ends_at:
                break
            running.add(pool.submit(played, name, seed))
            if len(running) == workers:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in ended)
        yield from (one.result() for one in as_completed(running))
