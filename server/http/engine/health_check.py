"""Whether this instance can serve, as found by a ping around the whole ring of processes.

A ring that answers late is busy, not dead: a tokenizer with a large batch, or more work than the machine has cores. So
one ping stays out until it comes back. Meanwhile the last verdict counts, until ``SILENT_SECONDS`` have passed. The
death of a process is not detected here: the supervisor sees it at once and ends the instance.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from ....messages.control import Identity, Pace, Ping
from ..errors import ApiError
from .engine_client import EngineClient
from .question_client import NoAnswer

QUICK_SECONDS = 0.5
"""How long an answer waits for the ping that is out."""
SILENT_SECONDS = 10.0
"""A ring without an answer for this long can't serve."""
CACHE_SECONDS = 0.2


class Verdict(NamedTuple):
    """Whether the instance is ready. ``reason``: why not, or a warning. ``identity``: the instance's, if known.

    ``hangs``: processes of the instance don't answer, so its requests won't end either.
    """

    ready: bool
    reason: str = ""
    identity: Identity | None = None
    hangs: bool = False
    pace: Pace | None = None


class HealthCheck:
    """Pings the ring, one ping at a time. Calls meanwhile, or up to 0.2 s later, get the same verdict."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = 0.0
        self._last = Verdict(False, "no process has answered yet")

    async def verdict(self) -> Verdict:
        """Ping the instance's processes, unless a ping is under way or just came back, and return the newest verdict.

        Wait at most ``QUICK_SECONDS`` for the ping. The verdict of the ping before counts until then.
        """
        asking = self._asking
        if asking is None or (asking.done() and time.monotonic() - self._answered_at >= CACHE_SECONDS):
            asking = self._asking = asyncio.create_task(self._ask())
        # A client that leaves must not cancel the ping of the others: waiting cancels nothing.
        await asyncio.wait((asking,), timeout=QUICK_SECONDS)
        return self._last

    async def _ask(self) -> None:
        try:
            pong = await self._engine.questions.ask(Ping(), SILENT_SECONDS)
            self._last = Verdict(pong.ready, pong.reason, pong.identity, pace=pong.pace)
        except NoAnswer:
            self._last = Verdict(
                False, f"no answer round the ring of processes within {SILENT_SECONDS:g} s", hangs=True
            )
        except ApiError as e:
            self._last = Verdict(False, e.message)
        finally:
            self._answered_at = time.monotonic()
