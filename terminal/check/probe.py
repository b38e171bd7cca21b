"""Looks at one thing, for a limited time: whatever hangs (a network disk, a server) ends as a finding."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .finding import Finding, problem


class Probe(NamedTuple):
    """``look`` finds out about ``topic``, in at most ``seconds``."""

    topic: str
    look: Callable[[], Iterable[Finding]]
    seconds: float = 10.0


def run_probe(probe: Probe) -> list[Finding]:
    """Run ``probe`` on a thread and return its findings. If it raises or takes too long, return only that as a problem.

    A thread that takes too long is left running.
    """
    results: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

    def work() -> None:
        try:
            found = list(probe.look())
        except Exception as e:  # noqa: BLE001
            # Broad on purpose: a machine so odd that a probe trips over it is a finding, and the rest wants to be seen.
            found = [problem(probe.topic, f"can't be looked at: {type(e).__name__}: {e}")]
        results.put(found)

    # A hanging thread cannot be ended, but the program does not wait for this one at its end.
    threading.Thread(target=work, name=f"probe of {probe.topic}", daemon=True).start()
    try:
        return results.get(timeout=probe.seconds)
    except queue.Empty:
        return [problem(probe.topic, f"no answer within {probe.seconds:g} s", "Find out what hangs there.")]
