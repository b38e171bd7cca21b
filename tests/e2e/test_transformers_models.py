"""A model by transformers' own class behind a prefill-decode pair: the tokens that transformers chooses itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.foreign import make_foreign
from support.model_harness import reference_logits
from support.processes import pd_pair
from support.tiny_model import CONFIG

TOKENS = 12
PROMPTS = [[50 + i, 900, *(77 * i + 5 * k for k in range(40 * i))] for i in range(3)]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return the greedy continuation of ``prompt`` by ``model``."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_a_pair_of_them_hands_over(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_foreign("StableLm", CONFIG)
    model.save_pretrained(folder)
    args = ["--model-path", str(folder), "--tokenizer-path", "smollm2", "--dtype", "float32"]
    with pd_pair(
        tmp_path, "tcp", *args, "--chunked-prefill-size", "32", "--disaggregation-threshold", "always"
    ) as pair:
        assert "model implementation: transformers" in pair.prefill.log()
        for prompt in PROMPTS:
            params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            answer = pair.router.generate(input_ids=prompt, sampling_params=params)
            assert answer["output_ids"] == greedy(model, prompt)
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(PROMPTS)
        pair.assert_all_returned()
