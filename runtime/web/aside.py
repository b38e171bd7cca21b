"""Work that must not hold up the event loop: on a thread, in steps.

A thread alone does not help: most parsers keep the interpreter to themselves until they return. So the work must
consist of steps that are short one by one; between two of them the event loop has its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Aside:
    """Runs work on a thread of its own, one piece after the other: large bodies wait for each other, and nothing else
    waits for them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-bodies")

    async def run(self, is_large: bool, work: Callable[[], T]) -> T:
        """Run ``work`` and return its result. It runs on the thread, after earlier work, if ``is_large``, else here."""
        if not is_large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
