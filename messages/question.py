"""Questions that HTTP asks another process of the instance, their answers, and the one form of refusal.

A question's class names the type of its answer: ``class RoleReq(Question[RoleResult])``. Any question may be answered
by ``RefusedAnswer`` instead. ``routes.py`` declares every question and answer to the channels by itself. A new one is
declared nowhere else; ``routes.py`` must import its module.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args

from .base import Message

A = TypeVar("A", bound="Answer")


class Answer(Message, kw_only=True):
    """Base of the answers to questions."""

    id: int = 0
    """Number of the question."""


class TextAnswer(Answer):
    """Base of the tokenizer process's answers to questions about text and tokens."""


class Question(Message, Generic[A], kw_only=True):
    """Base of the questions to the scheduler. ``A`` is the type of the answer."""

    id: int = 0
    """Number by which HTTP finds the question that an answer is for. HTTP sets it when it sends the question."""


class TextQuestion(Question[A], Generic[A]):
    """Base of the questions about text and tokens, which the tokenizer process answers itself."""


class RefusedAnswer(Answer):
    """Answer to a question that cannot be answered as asked."""

    status: int
    """HTTP status."""
    text: str
    """Why, and what to do about it."""


def answer_type(question: Question[A]) -> type[A]:
    """Return the class of the answer that ``question`` gets if it is not refused."""
    [base] = type(question).__orig_bases__  # type: ignore[attr-defined]
    [answer] = get_args(base)
    return answer  # type: ignore[no-any-return]


def subclasses(base: type[Message]) -> list[type[Any]]:
    """Return the message classes below ``base`` that have no subclasses of their own, in the order of their names."""
    found: list[type[Any]] = []
    for each in base.__subclasses__():
        found += subclasses(each) or [each]
    return sorted(found, key=lambda cls: cls.__name__)
