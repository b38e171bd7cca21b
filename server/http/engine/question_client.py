"""The HTTP process's side of questions to the scheduler and to the tokenizer (``messages/question.py``)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from ....messages.base import Message
from ....messages.question import Answer, Question, RefusedAnswer, TextQuestion, answer_type
from ....messages.text import Limits, LimitsReq
from ..errors import ApiError

A = TypeVar("A", bound=Answer)


class NoAnswer(ApiError):
    """503: a process did not answer in time. What was asked may still happen."""

    def __init__(self, process: str, seconds: float) -> None:
        super().__init__(503, f"the {process} did not answer within {seconds:g} s")


class QuestionRefused(ApiError):
    """A refusal by the asked process, with the status and the text that it gave."""


class QuestionClient:
    """Sends questions by ``send`` and gives each answer to its waiter. Event-loop thread only."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1)
        self._limits: Limits | None = None
        self._closed: str | None = None

    async def ask(self, question: Question[A], seconds: float) -> A:
        """Send a question to the scheduler or the tokenizer, wait for its answer, and return it.

        Raises ``QuestionRefused``, ``NoAnswer`` after ``seconds`` without an answer, and ``ApiError`` 503 after
        ``close``.
        """
        self._check_open()
        question.id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = future
        try:
            self._send(question)
            async with asyncio.timeout(seconds):
                answer = await future
        except TimeoutError:
            raise NoAnswer("tokenizer" if isinstance(question, TextQuestion) else "scheduler", seconds) from None
        finally:
            del self._waiting[question.id]
        if isinstance(answer, RefusedAnswer):
            raise QuestionRefused(answer.status, answer.text)
        if not isinstance(answer, answer_type(question)):
            raise TypeError(f"{type(question).__name__} was answered by {type(answer).__name__}")
        return answer

    async def limits(self, seconds: float) -> Limits:
        """Return the model's context length and vocabulary size.

        The tokenizer is asked only until it has answered once. Raises as ``ask`` does, after ``seconds`` without an
        answer.
        """
        self._check_open()
        if self._limits is None:
            self._limits = await self.ask(LimitsReq(), seconds)
        return self._limits

    def on_answer(self, answer: Answer) -> None:
        """Hand ``answer`` to the ``ask`` that waits for it. Drop it if none does because it came too late."""
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)

    def close(self, reason: str) -> None:
        """Fail every question that waits, and all later ones, with an ``ApiError`` 503 that says ``reason``."""
        self._closed = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ApiError(503, reason))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ApiError(503, self._closed)
