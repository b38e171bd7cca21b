"""The queue of questions about text (``/tokenize``, ``/detokenize``), in front of the tokenizer process.

    arrived ──turn──▶ sent ──answer──▶ done
       ├── too many wait: 429
       └── the client goes: dropped, which costs nothing

The tokenizer gets one long question at a time, so a client that repeatedly asks and disconnects can't keep more than
one busy. Short ones do not wait for long ones here. API keys take turns, and none of them can fill the queue.

Questions with a conversation wait for the chat template, which may take a second for each. Each key has one of them at
the tokenizer, where keys take turns. No other question waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from ....runtime.key_queue import KeyQueue
from ....runtime.web.keys import Caller
from ...key_shares import KeyShares
from ..errors import ApiError

A = TypeVar("A")
SHORT = 1 << 12
"""Maximum work of a short question, in characters or token ids: a few milliseconds."""
SHORT_AT_ONCE = 8
"""Maximum number of short questions at the tokenizer."""
MAX_WAITING = 1 << 11
"""Maximum number of questions that wait for their turn, half of them of one API key."""
MAX_WAITING_WORK = 1 << 24
"""Maximum work of the questions that wait, in characters or token ids: some 64 MiB, and some 10 s of the tokenizer.

One API key may have half of it.
"""


class _Turns:
    """A number of turns, and the questions that wait for one."""

    def __init__(self, at_once: int) -> None:
        self._at_once = self._free = at_once
        self._waiting: KeyQueue[asyncio.Future[None]] = KeyQueue()

    @property
    def is_idle(self) -> bool:
        """Whether no question has one of the turns."""
        return self._free == self._at_once

    def take(self) -> bool:
        """Take a turn, the right to be at the tokenizer, if one is free. Return whether one was; never wait."""
        if self._free:
            self._free -= 1
            return True
        return False

    def wait(self, key: str) -> asyncio.Future[None]:
        """Queue a question of ``key`` for a turn. Return a future that is done when the question has the turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(key, turn)
        return turn

    def withdraw(self, key: str, turn: asyncio.Future[None]) -> None:
        """Remove a question of ``key`` from the queue. ``turn``: its future from ``wait``, which is not done."""
        self._waiting.remove(key, turn)

    def give_back(self) -> None:
        """End a turn: pass it to the next question that waits, keys in rotation, or free it if none waits."""
        if self._waiting:
            self._waiting.pop().set_result(None)
        else:
            self._free += 1


class QuestionQueue:
    """Lets questions through to the tokenizer: those of one API key in the order of their arrival, keys in rotation."""

    def __init__(self) -> None:
        self._short = _Turns(SHORT_AT_ONCE)
        self._long = _Turns(1)
        self._chats: dict[str, _Turns] = {}
        """Turns of questions with conversations, by API key."""
        self._count = KeyShares(MAX_WAITING)
        self._work = KeyShares(MAX_WAITING_WORK)

    @property
    def waiting(self) -> int:
        """Number of questions that wait for their turn, those with a turn not included."""
        return self._count.held

    @property
    def waiting_work(self) -> int:
        """Work of the questions that wait for their turn, in characters or token ids."""
        return self._work.held

    async def ask(self, request: Request, work: int, ask: Callable[[], Awaitable[A]], *, has_chat: bool = False) -> A:
        """Wait for this question's turn, call ``ask``, and return its result.

        The body of ``request`` must have been read. ``work``: characters or token ids of the question. ``has_chat``:
        whether it is about a conversation. Raises ``ApiError`` 429 if too many questions wait, ``ClientDisconnect`` if
        the client goes before its turn.
        """
        key = Caller.of(request.scope).name
        turns = self._short if work <= SHORT else self._long
        if has_chat:
            turns = self._chats.setdefault(key, _Turns(1))
        if not turns.take():
            await self._wait(turns, key, request, work)
        answer = asyncio.ensure_future(ask())
        # The turn lasts until the tokenizer is done, even if its answer is no longer awaited.
        answer.add_done_callback(lambda _: self._give_back(turns, key))
        return await asyncio.shield(answer)

    def _give_back(self, turns: _Turns, key: str) -> None:
        turns.give_back()
        if turns.is_idle and self._chats.get(key) is turns:
            del self._chats[key]

    async def _wait(self, turns: _Turns, key: str, request: Request, work: int) -> None:
        self._check(self._count, key, 1, "questions about text")
        self._check(self._work, key, work, "characters and token ids of questions about text")
        self._count.take(key, 1)
        self._work.take(key, work)
        turn, gone = turns.wait(key), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise ClientDisconnect
        except BaseException:  # cancelled, or the client has gone: the turn must not be lost
            if turn.done():
                self._give_back(turns, key)
            else:
                turns.withdraw(key, turn)
            raise
        finally:
            gone.cancel()
            self._count.give_back(key, 1)
            self._work.give_back(key, work)

    @staticmethod
    def _check(shares: KeyShares, key: str, amount: int, what: str) -> None:
        """Raise ``ApiError`` 429 if ``key`` may not have ``amount`` more.

        ``what``: what ``shares`` count, for the message.
        """
        if not shares.has_room(key, amount):
            raise ApiError(
                429,
                f"{shares.of(key)} {what} of this API key wait, {shares.held} of all keys; the limit is {shares.most}, "
                "of which a key may have as many as it leaves free; try again later",
                code=shares.refusal_code(key, amount),
            )


async def _disconnected(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
