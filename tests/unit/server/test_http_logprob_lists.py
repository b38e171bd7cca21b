"""The logprob lists of a stream: the same as rendered anew, and each entry rendered once."""

from __future__ import annotations

from typing import Any

import orjson

from pdserve.messages.outputs import NamedLogprob, PromptText
from pdserve.server.http.native.logprob_lists import EncodedList, LogprobLists


def entries(*ids: int) -> list[NamedLogprob]:
    return [NamedLogprob(i, -1.0, b"t%d" % i, 2, [(i + 1, -2.0, b"\xf0")]) for i in ids]


def test_each_entry_is_rendered_once() -> None:
    rendered: list[int] = []

    def render(entry: NamedLogprob) -> Any:
        rendered.append(entry.token_id)
        return entry.token_id

    encoded = EncodedList(render)
    all_entries = entries(*range(5))
    lists = [orjson.loads(orjson.dumps(encoded.upto(all_entries[:n]))) for n in (0, 2, 2, 5)]
    assert lists == [[], [0, 1], [0, 1], [0, 1, 2, 3, 4]]
    assert rendered == [0, 1, 2, 3, 4]


def test_lists_of_the_prompt_and_of_the_output() -> None:
    lists = LogprobLists(top=False)
    assert orjson.loads(orjson.dumps(lists.upto(None, [])))["input_token_logprobs"] == []
    prompt = PromptText("", [], entries(1, 2))
    assert orjson.loads(orjson.dumps(lists.upto(prompt, entries(3)))) == {
        "input_token_logprobs": [[-1.0, 1, None], [-1.0, 2, None]],
        "output_token_logprobs": [[-1.0, 3, None]],
    }


def test_texts_where_they_are_asked_for() -> None:
    lists = LogprobLists(top=True, texts=True)
    prompt = PromptText("", [], [NamedLogprob(0, None, b"<s>", 0)])
    lists_sent = orjson.loads(orjson.dumps(lists.upto(prompt, entries(3))))
    assert lists_sent["input_token_logprobs"] == [[None, 0, "<s>"]]
    assert lists_sent["input_top_logprobs"] == [None]
    assert lists_sent["output_token_logprobs"] == [[-1.0, 3, "t3"]]
    assert lists_sent["output_top_logprobs"] == [[[-2.0, 4, "\N{REPLACEMENT CHARACTER}"]]]
