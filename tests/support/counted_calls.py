"""Counts of calls, for tests of cost: work, not time, which depends on other processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Count the calls of Python and C functions in this thread, as the only element of the list."""
    calls = [0]

    def note(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
