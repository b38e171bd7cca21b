"""A model with windows behind real processes: unified, where pages behind the window go back, and by a prefill-decode
pair, where they are kept. Its tokens are those that transformers chooses, over contexts many windows long.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from support.model_harness import draw_weights, reference_logits
from support.processes import Launched, launched, pd_pair, wait_until
from support.tiny_model import CONFIG

TOKENS = 12
WINDOW = 40
FIRST = [(7 * i * i + 3) % 900 + 50 for i in range(400)]
PROMPTS = [FIRST, FIRST[:330] + [5 * i + 60 for i in range(50)], [11 * i % 800 + 70 for i in range(350)], FIRST[:60]]
ARGS = ("--tokenizer-path", "smollm2", "--dtype", "float32", "--chunked-prefill-size", "64")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A Gemma 3, and what it goes on with."""
    folder = tmp_path_factory.mktemp("gemma")
    config = transformers.Gemma3TextConfig(
        **CONFIG | {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        attn_implementation="eager",
    )
    model = draw_weights(transformers.Gemma3ForCausalLM(config))
    model.save_pretrained(folder)
    return folder, [greedy(model, prompt) for prompt in PROMPTS]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def answers(server: Launched) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        got = pool.map(lambda ids: server.generate(input_ids=ids, sampling_params=params), PROMPTS)
        return [answer["output_ids"] for answer in got]


def test_a_unified_server_gives_pages_back(served: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = served
    with launched(
        tmp_path, "unified", "server", "--model-path", str(folder), *ARGS, "--max-total-tokens", "2048"
    ) as server:
        server.wait_healthy()
        # The second time what is cached is found, as far as its windows are.
        for _ in range(2):
            assert answers(server) == expected
        pool = server.info()["pool"]
        assert pool["window_total"] < sum(map(len, PROMPTS))
        wait_until(lambda: server.info()["invariants_steps_ago"] == 0, 15, "a check of the idle server")
        info = server.info()
        assert info["pool"]["in_use"] == info["pool"]["window_in_use"] == 0


def test_a_pair_keeps_them(served: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = served
    with pd_pair(tmp_path, "tcp", "--model-path", str(folder), *ARGS, "--max-total-tokens", "2048") as pair:
        assert answers(pair.router) == expected
        assert "window_total" not in pair.prefill.info()["pool"]
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(PROMPTS)
        pair.assert_all_returned()
