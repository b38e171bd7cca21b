"""Copies between the pool and host memory.

The worker makes copies between pool and host in the order of its messages, between the steps. Copies of pages that are
about to be overwritten or needed go ``before`` the next step. Copies of what that step computes go ``after`` it.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..messages.base import Message, pack_i32
from ..messages.tiers import CopyPages, PageCopy, PagesCopied
from .copy_pace import CopyPace

Copy = tuple[int, int, int]
"""Kind (``PageCopy``), page of the pool, page of the host."""


class PoolCopies:
    """Copies that are planned, sent, and done. ``ids`` numbers all messages to the worker."""

    def __init__(self, ids: itertools.count[int], part_bytes: float) -> None:
        self.pace = CopyPace(part_bytes)
        self.done = 0
        """Id of the newest ``CopyPages`` that the worker has done."""
        self._ids = ids
        self._before: list[Copy] = []
        self._after: list[Copy] = []
        self._commands: list[Message] = []
        self._newest = self._sealed = 0

    def add(self, kind: PageCopy, page: int, host_page: int) -> None:
        """Plan the copy of a page between the pool and the host, in the direction of ``kind``, before the next step."""
        self._before.append((kind, page, host_page))

    def mark(self) -> int:
        """Return a position in the list of planned copies; ``defer`` puts off the copies added after it."""
        return len(self._before)

    def defer(self, mark: int) -> None:
        """Put off the copies added since ``mark`` until after the step that is being planned, which computes their
        pages.

        Nothing more is evicted in that plan. (Retraction comes earlier in a plan, and its pages may get a new owner in
        the same step.)
        """
        self._after += self._before[mark:]
        del self._before[mark:]

    def take_before(self) -> list[Message]:
        """Remove and return the messages for the worker that must precede the step that was just planned."""
        self._seal(self._before)
        self._before = []
        return self._take()

    def take(self) -> list[Message]:
        """Remove and return all messages for the worker. Every step that was planned must have been sent."""
        self.fence()
        return self._take()

    def fence(self) -> int:
        """Close the planned copies into a message, and return its id.

        When ``done`` has reached that id, no copy touches memory that can be allocated now. Not valid while a step is
        being planned.
        """
        self._seal(self._before + self._after)
        self._before, self._after = [], []
        return self._newest

    def new_ms(self) -> float:
        """Estimate the milliseconds that the copies planned since the last call will take."""
        total = self._sealed + len(self._before) + len(self._after)
        return self.pace.new_ms(total) if total else 0.0

    def on_copied(self, event: PagesCopied) -> None:
        """Note that the worker has made the copies up to ``event.id``, and learn their speed."""
        self.done = event.id
        self.pace.learn(event.id, event.seconds)

    def _seal(self, copies: list[Copy]) -> None:
        if copies:
            self._newest = next(self._ids)
            self._sealed += len(copies)
            self.pace.sent(self._newest, len(copies))
            triples = pack_i32(np.array(copies, dtype=np.int32).ravel())
            self._commands.append(CopyPages(self._newest, triples))

    def _take(self) -> list[Message]:
        messages, self._commands = self._commands, []
        return messages
