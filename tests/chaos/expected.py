"""The model, the questions, and the only right answers to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from support.processes import ONE_THREAD, launched
from support.tiny_model import tiny_args

MOST_TOKENS = 240
PAGE = 16
CHUNK = 64
"""Prompts longer than this are computed, and sent, in pieces."""
LENGTHS = (1, 3, PAGE, PAGE + 1, 40, CHUNK, CHUNK + 1, 150, 300, 513, 1200)
EACH = 6
PREFIXED = 24
BATCH = 16


@dataclass(frozen=True)
class Question:
    """A prompt and the tokens that follow it."""

    prompt: list[int]
    answer: list[int]


def model_args(folder: Path) -> list[str]:
    """Flags that serve a tiny model with random weights and a real tokenizer."""
    # A pool that is small for the load: pages are used again soon, by others, and prefixes are dropped and sent again.
    return [*tiny_args(folder), *ONE_THREAD, "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "6144"]


def prompts() -> list[list[int]]:
    """Draw several prompts of every length that matters, and some with a common beginning."""
    rng = random.Random(0)
    draw = lambda count: [rng.randrange(100, 40000) for _ in range(count)]  # noqa: E731
    shared = draw(9 * PAGE)
    alone = [draw(length) for length in LENGTHS for _ in range(EACH)]
    return alone + [shared[: rng.choice((3, 9)) * PAGE] + draw(rng.randrange(1, 80)) for _ in range(PREFIXED)]


def questions(tmp: Path, args: list[str]) -> list[Question]:
    """Answered by one instance that hands nothing over."""
    asked = prompts()
    params = {"temperature": 0, "max_new_tokens": MOST_TOKENS, "ignore_eos": True}
    with launched(tmp, "alone", "server", *args) as server:
        server.wait_healthy()
        answers = []
        for i in range(0, len(asked), BATCH):
            response = server.post("/generate", {"input_ids": asked[i : i + BATCH], "sampling_params": params})
            answers += [answer["output_ids"] for answer in response.raise_for_status().json()]
    # An answer that repeats itself would not tell a wrong token from a right one.
    assert all(len(set(answer)) > MOST_TOKENS // 8 for answer in answers), [len(set(a)) for a in answers]
    return [Question(ids, answer) for ids, answer in zip(asked, answers, strict=True)]
