"""The logprob lists of a stream: the same as rendered anew, and each entry rendered once."""

from __future__ import annotations

from typing import Any

import orjson

from pdserve.messages.outputs import ReqMeta, Timing, TokenLogprob
from pdserve.server.http.logprob_lists import EncodedList, LogprobLists
from pdserve.server.http.submission import Choice


def test_each_entry_is_rendered_once() -> None:
    rendered: list[int] = []

    def render(entry: TokenLogprob) -> Any:
        rendered.append(entry.token_id)
        return entry.token_id

    encoded = EncodedList(render)
    entries = [TokenLogprob(i, -1.0) for i in range(5)]
    lists = [orjson.loads(orjson.dumps(encoded.upto(entries[:n]))) for n in (0, 2, 2, 5)]
    assert lists == [[], [0, 1], [0, 1], [0, 1, 2, 3, 4]]
    assert rendered == [0, 1, 2, 3, 4]


def test_the_prompts_lists_are_those_of_the_last_word() -> None:
    choice = Choice(0, 0, "r", "r", 0.0)
    lists = LogprobLists(top=False)
    assert orjson.loads(orjson.dumps(lists.upto_now(choice)))["input_token_logprobs"] == []
    for ids in ([1, 2], [3]):
        prompt = [TokenLogprob(i, -1.0) for i in ids]
        choice.meta = ReqMeta(1, 1, 0, Timing(), input_logprobs=prompt)
        assert orjson.loads(orjson.dumps(lists.upto_now(choice))) == {
            "input_token_logprobs": [[-1.0, i, None] for i in ids],
            "output_token_logprobs": [],
        }
