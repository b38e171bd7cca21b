"""A DeepSeek behind a prefill-decode pair: latent rows are handed over, between engines too, and the tokens are those
that transformers chooses itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from support.families import LATENT, YARN
from support.model_harness import draw_weights, greedy
from support.processes import pd_pair
from support.tiny_model import CONFIG

pytestmark = pytest.mark.timeout(300)

TOKENS = 12
# Less than a page, whole pages and some with a rest, in several chunks.
PROMPTS = [[50 + i, 900, *(77 * i + 5 * k for k in range(count))] for i, count in enumerate((3, 62, 100))]
FIELDS = LATENT | {
    **{key: CONFIG[key] for key in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
    "hidden_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


class Served(NamedTuple):
    """``expected``: what transformers goes on with, for each prompt."""

    folder: Path
    expected: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("deepseek")
    config = transformers.DeepseekV3Config(**FIELDS, attn_implementation="eager")
    model = draw_weights(transformers.DeepseekV3ForCausalLM(config))
    model.save_pretrained(folder)
    return Served(folder, [greedy(model, prompt, TOKENS) for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("backend", "prefill", "decode"),
    [
        pytest.param("shm", "cpu", "cpu", marks=pytest.mark.slow),
        pytest.param("shm", "torch", "cpu", marks=pytest.mark.slow),
        pytest.param("tcp", "cpu", "torch", marks=pytest.mark.slow),
        pytest.param("tcp", "torch", "torch", marks=pytest.mark.slow),
    ],
)
def test_a_pair_hands_latent_rows_over(tmp_path: Path, served: Served, backend: str, prefill: str, decode: str) -> None:
    args = ["--model-path", str(served.folder), "--tokenizer-path", "smollm2", "--dtype", "float32"]
    args += ["--chunked-prefill-size", "32", "--disaggregation-threshold", "always"]
    own = {"prefill_args": ("--attention-backend", prefill), "decode_args": ("--attention-backend", decode)}
    with pd_pair(tmp_path, backend, *args, **own) as pair:
        for prompt, expected in zip(PROMPTS, served.expected, strict=True):
            params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            answer = pair.router.generate(input_ids=prompt, sampling_params=params)
            assert answer["output_ids"] == expected
        kinds = [group["kind"] for group in pair.decode.info()["kv_layout"]["groups"]]
        assert kinds == ["mla"]
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(PROMPTS)
        pair.assert_all_returned()
