"""What a growing answer costs: nothing that was told is copied again, or even kept where nothing repeats it."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, events, with_engine

from pdserve.messages.outputs import NamedLogprob, ReqText
from pdserve.server.http.engine import submission
from pdserve.server.http.engine.logprob_account import LogprobAccount
from pdserve.server.http.engine.submission import Choice, Delta, ScoredSubmission

PIECE = "word "


def make_choice(**fields: Any) -> Choice:
    return Choice(0, 0, "a", "a", 0.0, **fields)


def item(i: int) -> ReqText:
    return ReqText("a", PIECE, [i], logprobs=[NamedLogprob(i, -1.0, PIECE.encode(), len(PIECE))])


def grow(choice: Choice, tokens: int, taken_each: int) -> list[Delta]:
    deltas = []
    owner = ScoredSubmission(LogprobAccount(), [choice], names=[], streaming=True)
    for i in range(tokens):
        owner.update(choice, item(i), 1.0)
        if (i + 1) % taken_each == 0:
            deltas.append(choice.take())
    return deltas


@pytest.mark.parametrize("taken_each", [1, 4])
def test_a_stream_that_repeats_nothing_keeps_nothing_that_it_has_sent(taken_each: int) -> None:
    choice = make_choice(keeps_sent=False)
    deltas = grow(choice, 400, taken_each)
    assert "".join(delta.text for delta in deltas) == 400 * PIECE
    assert [i for delta in deltas for i in delta.token_ids] == list(range(400))
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == list(range(400))
    assert [delta.offset for delta in deltas] == list(range(0, 400 * len(PIECE), taken_each * len(PIECE)))
    assert (choice.text, choice.token_ids, choice.logprobs) == ("", [], [])
    assert (choice.chars, choice.completion_tokens) == (400 * len(PIECE), 400)
    assert (choice.sent_chars, choice.sent_tokens, choice.sent_logprob_chars) == (2000, 400, 2000)


def test_a_whole_answer_is_put_together_once() -> None:
    choice = make_choice()
    for i in range(1000):
        choice.add(item(i), 1.0)
    assert len(choice._pieces) == 1000, "nothing is copied as it grows"
    assert choice.text == 1000 * PIECE
    assert choice.text is choice.text
    assert choice.token_ids == list(range(1000))


def test_a_stream_that_repeats_copies_its_text_once_for_each_event() -> None:
    choice = make_choice()
    for i in range(100):
        choice.add(item(i), 1.0)
        choice.add(item(i), 1.0)
        assert len(choice._pieces) <= 3
        assert choice.take().text == 2 * PIECE
        assert choice.text == 2 * (i + 1) * PIECE


@pytest.mark.parametrize("keeps_sent", [False, True])
def test_what_was_sent_elsewhere_is_not_sent_again(keeps_sent: bool) -> None:
    choice = make_choice(keeps_sent=keeps_sent, sent_chars=7 * len(PIECE), sent_tokens=7, opened=True)
    deltas = grow(choice, 12, 2)
    assert [len(delta.token_ids) for delta in deltas] == [0, 0, 0, 1, 2, 2]
    assert "".join(delta.text for delta in deltas) == 5 * PIECE
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == list(range(7, 12))
    assert (choice.sent_chars, choice.sent_tokens) == (12 * len(PIECE), 12)


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 9, "logprobs": 1}, 0),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}, 0),
        ("/generate", {"text": "x", "incremental": True, "sampling_params": {"max_new_tokens": 9}}, 0),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 9}}, 9),
    ],
)
def test_only_streams_that_repeat_keep_what_they_have_sent(
    path: str, body: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: list[Choice] = []
    made = submission.Submission.__init__

    def record(self: submission.Submission, of: list[Choice], **fields: Any) -> None:
        choices.extend(of)
        made(self, of, **fields)

    monkeypatch.setattr(submission.Submission, "__init__", record)

    async def check(engine: FakeEngine) -> None:
        extra = {"stream_options": {"include_usage": True}} if path.startswith("/v1") else {}
        said = events(await engine.post(path, {**body, **extra, "stream": True}))
        last = said[-1]
        tokens = last["usage"]["completion_tokens"] if extra else last["meta_info"]["completion_tokens"]
        assert tokens == 9

    with_engine(check)
    [choice] = choices
    assert (len(choice.token_ids), choice.completion_tokens) == (kept, 9)
