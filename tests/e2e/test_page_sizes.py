"""Tokens are the same at every page size, alone and over a pair."""

from __future__ import annotations

import pytest
from support.processes import Launched, pd_pair

PROMPTS = [[(7 * i + length) % 90 + 3 for i in range(length)] for length in (1, 63, 64, 129, 300)]
TOKENS = 70
"""At least one border is crossed while decoding, whatever the page."""


def answers(server: Launched) -> list[list[int]]:
    """Return the output of each prompt, and of each again, with its pages cached."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return [server.generate(input_ids=ids, sampling_params=params)["output_ids"] for ids in PROMPTS * 2]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_tokens_do_not_depend_on_the_page(tmp_path, tiny_args, page_size: int, usual: list[list[int]]) -> None:
    with pd_pair(tmp_path, "shm", *tiny_args, "--page-size", str(page_size)) as pair:
        assert answers(pair.router) == usual
        assert pair.decode.info()["disaggregation"]["received"]["done"] > 0
        # Without a router a request names no hand-over: the prefill answers by itself.
        assert answers(pair.prefill) == usual
        pair.assert_all_returned()


@pytest.fixture(scope="module")
def usual(alone) -> list[list[int]]:
    """Answers of an instance with pages of 16 tokens."""
    given = answers(alone)
    assert given[: len(PROMPTS)] == given[len(PROMPTS) :]
    return given
