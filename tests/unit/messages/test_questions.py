"""Questions and answers are declared to the channels by their base classes."""

from __future__ import annotations

from typing import get_args

import pytest

from pdserve.messages import routes
from pdserve.messages.channel import encode
from pdserve.messages.control import MAX_TRANSFERS, Ping, Pong, RoleReq, RoleResult, Transfers
from pdserve.messages.decode import Codec
from pdserve.messages.question import Answer, Question, RefusedAnswer, TextQuestion, answer_type, subclasses
from pdserve.messages.text import Encoded, EncodeReq

QUESTIONS = subclasses(Question)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda kind: kind.__name__)
def test_a_question_and_its_answer_are_declared_wherever_they_pass(question: type[Question[Answer]]) -> None:
    [answer] = get_args(question.__orig_bases__[0])  # type: ignore[attr-defined]
    is_text = issubclass(question, TextQuestion)
    assert question in get_args(routes.ToTokenizer)
    assert (question in get_args(routes.ToScheduler)) is not is_text
    assert answer in get_args(routes.ToHttp)
    assert (answer in get_args(routes.ToDetokenizer)) is not is_text


def test_a_refusal_may_come_from_the_scheduler() -> None:
    for channel in (routes.ToDetokenizer, routes.ToHttp):
        said = [RefusedAnswer(409, "no", id=3), Transfers(MAX_TRANSFERS, [], id=4)]
        assert Codec(channel, 1 << 20).decode(encode(said)) == said


def test_no_base_class_is_declared() -> None:
    for channel in (routes.ToTokenizer, routes.ToScheduler, routes.ToDetokenizer, routes.ToHttp):
        assert not {Question, TextQuestion, Answer} & set(get_args(channel))


def test_a_question_knows_its_answer() -> None:
    assert [answer_type(q) for q in (Ping(), RoleReq("decode"), EncodeReq(["a"]))] == [Pong, RoleResult, Encoded]
