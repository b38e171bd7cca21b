"""``min_tokens`` and ``min_new_tokens`` through HTTP, scheduler and detokenizer hold back stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import events
from support.sim import reference_output
from support.sim_ring import PIECES, SimRing

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 12
OUTPUT = reference_output(PROMPT, TOKENS)
TEXT = b"".join(PIECES[i] for i in OUTPUT).decode(errors="replace")
END = 6
STOP = TEXT[3:END]
"""Complete with the sixth token; its characters are a token each."""


def generate(minimum: int, **more: Any) -> tuple[str, dict[str, Any]]:
    sampling = {"max_new_tokens": TOKENS, "min_new_tokens": minimum, "temperature": 0, "stop": STOP}
    sampling |= {name: more.pop(name) for name in ("n", "ignore_eos") if name in more}
    return "/generate", {"input_ids": PROMPT, "sampling_params": sampling, **more}


def complete(minimum: int, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "min_tokens": minimum, "temperature": 0, "stop": STOP}
    return "/v1/completions", {**body, "return_token_ids": True, **more}


def answers(path: str, body: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return text and tokens of each choice."""
    [response] = SimRing().post(body, path=path)
    whole = [] if body.get("stream") else response.json()
    if path == "/generate":
        last = {event.get("index", 0): event for event in events(response)} if body.get("stream") else {}
        found = list(last.values()) or (whole if isinstance(whole, list) else [whole])
        return [(answer["text"], answer["output_ids"]) for answer in found]
    chunks = events(response) if body.get("stream") else [whole]
    choices: dict[int, tuple[str, list[int]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, ids = choices.get(choice["index"], ("", []))
        choices[choice["index"]] = text + choice["text"], ids + choice["token_ids"]
    return list(choices.values())


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}, {"ignore_eos": True}])
@pytest.mark.parametrize("api", [generate, complete])
def test_a_stop_string_counts_behind_the_minimum_only(api: Any, more: dict[str, Any]) -> None:
    assert STOP not in TEXT[END - len(STOP) + 1 :], "the text of this test has it once"
    choices = more.get("n", 1)
    for minimum in (0, END - 1):  # also where it begins within the minimum
        assert answers(*api(minimum, **more)) == [(TEXT[: END - len(STOP)], OUTPUT[:END])] * choices
    for minimum in (END, TOKENS):
        assert answers(*api(minimum, **more)) == [(TEXT, OUTPUT)] * choices
