"""A table of the methods that handle the messages of the scheduler process.

A method is marked with what it handles, in the class that does the work::

    @answers(FlushCacheReq)
    def flush(self, question: FlushCacheReq, now: float) -> FlushCacheResult | RefusedAnswer: ...

    @receives(PoolTrimmed)
    def on_trimmed(self, event: PoolTrimmed, now: float) -> None: ...

If an answer takes time, the method returns None and answers later, by ``Outbox.reply``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..messages.base import Message
from ..messages.question import Answer, Question, RefusedAnswer
from .outbox import Outbox

A = TypeVar("A", bound=Answer)
S = TypeVar("S")
Q = TypeVar("Q", bound=Question[Any])
M = TypeVar("M")
Handler = Callable[[Any, float], Answer | None]
MARK = "_handles"


def answers(
    kind: type[Question[A]],
) -> Callable[[Callable[[S, Q, float], A | RefusedAnswer | None]], Callable[[S, Q, float], A | RefusedAnswer | None]]:
    """Return a decorator that marks the method that answers questions of this type.

    The method returns the answer, or None if it answers later by ``Outbox.reply``.
    """
    return receives(kind)


def receives(*kinds: type[Message]) -> Callable[[M], M]:
    """Return a decorator that marks the method that handles messages of these types, so that ``Handlers`` finds it."""

    def mark(method: M) -> M:
        setattr(method, MARK, kinds)
        return method

    return mark


class Handlers:
    """The marked methods of ``owners``, by message. Raises ``ValueError`` if two methods handle the same."""

    def __init__(self, outbox: Outbox, *owners: object) -> None:
        self._outbox = outbox
        self._by_kind: dict[type[Message], Handler] = {}
        for owner in owners:
            for name in dir(type(owner)):
                for kind in getattr(getattr(type(owner), name), MARK, ()):
                    if kind in self._by_kind:
                        raise ValueError(f"{kind.__name__} is handled by two methods")
                    self._by_kind[kind] = getattr(owner, name)

    @property
    def kinds(self) -> set[type[Message]]:
        """Types of the messages that are handled."""
        return set(self._by_kind)

    def handle(self, message: Message, now: float) -> None:
        """Pass a message to its method, and send the answer if the method returns one.

        Raises ``KeyError`` if no method handles it.
        """
        answer = self._by_kind[type(message)](message, now)
        if answer is not None:
            assert isinstance(message, Question)
            self._outbox.reply(message, answer)
