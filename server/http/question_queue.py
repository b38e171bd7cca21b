"""The queue of questions about text (``/tokenize``, ``/detokenize``), in front of the tokenizer process.

    arrived ──turn──▶ sent ──answer──▶ done
       ├── too many wait: 429
       └── the client goes: dropped, which costs nothing

One long question is at the tokenizer at a time, so that a client who asks and goes again and again keeps no more than
one busy. Short ones do not wait for long ones here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError

A = TypeVar("A")
SHORT = 1 << 12
"""Maximum work of a short question, in characters or token ids: a few milliseconds."""
SHORT_AT_ONCE = 8
"""Maximum number of short questions at the tokenizer."""
MAX_WAITING = 1024
"""Maximum number of questions that wait for their turn."""
MAX_WAITING_WORK = 1 << 23
"""Maximum work of the questions that wait, in characters or token ids: some 32 MiB, and some 5 s of the tokenizer."""


class QuestionQueue:
    """Lets questions through to the tokenizer, in the order of their arrival."""

    def __init__(self) -> None:
        self._short = asyncio.Semaphore(SHORT_AT_ONCE)
        self._long = asyncio.Semaphore(1)
        self.waiting = 0
        """Questions that wait for their turn."""
        self.waiting_work = 0
        """Their work, in characters or token ids."""

    async def ask(self, request: Request, work: int, ask: Callable[[], Awaitable[A]]) -> A:
        """Return what ``ask`` returns, called when it is this question's turn. The body must have been read.

        Raises ``ApiError`` 429 if too many questions wait, ``ClientDisconnect`` if the client goes before its turn.
        """
        turns = self._short if work <= SHORT else self._long
        if turns.locked():
            await self._wait(turns, request, work)
        else:
            await turns.acquire()
        answer = asyncio.ensure_future(ask())
        # The turn lasts until the tokenizer is done, even if nobody waits for its answer any more.
        answer.add_done_callback(lambda _: turns.release())
        return await asyncio.shield(answer)

    async def _wait(self, turns: asyncio.Semaphore, request: Request, work: int) -> None:
        if self.waiting >= MAX_WAITING or self.waiting_work + work > MAX_WAITING_WORK:
            message = f"{self.waiting} questions about text wait already, which is the most; try again later"
            raise ApiError(429, message)
        self.waiting += 1
        self.waiting_work += work
        turn, gone = asyncio.ensure_future(turns.acquire()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise ClientDisconnect
        except BaseException:  # cancelled, or the client has gone: the turn must not be lost
            if turn.done():
                turns.release()
            raise
        finally:
            turn.cancel()
            gone.cancel()
            self.waiting -= 1
            self.waiting_work -= work


async def _disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
