"""A model with generated tokens that attend to few of the others. Its tokens are the same in every situation.

They are: one request after another, all at once, after cached prompts, after a retraction, and by a prefill-decode pair
with pages that carry the labels.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from support.model_harness import draw_weights
from support.processes import ONE_THREAD, Launched, launched, pd_pair
from support.tiny_model import CONFIG

from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.calibration.calibrate import CalibrateOptions, rank_channels
from pdserve.model_runner.kv.sparse.channels import write_channels

pytestmark = pytest.mark.timeout(300)
TOKENS = 100
FIRST = [(7 * i * i + 3) % 900 + 50 for i in range(200)]
PROMPTS = [FIRST, FIRST[:112] + [5 * i + 60 for i in range(70)], [11 * i % 800 + 70 for i in range(150)], FIRST[7:27]]
POOL = ("--max-total-tokens", "2048")


class Served(NamedTuple):
    """``args``: for a server with labels. ``expected``: its tokens, one request after another."""

    dense: list[str]
    args: list[str]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("llama")
    model = draw_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)))
    model.save_pretrained(folder)
    tuning = {"model_path": str(folder), "tokenizer_path": "smollm2", "tokens": 256, "window": 256, "dtype": "float32"}
    spec, ranked, tokens = rank_channels(CalibrateOptions(**tuning))
    assert spec == read_spec(resolve_model(str(folder)))
    write_channels(folder / "channels.json", spec, ranked, tokens)
    dense = ["--model-path", str(folder), "--tokenizer-path", "smollm2", "--dtype", "float32", "--chunked-prefill-size"]
    dense += ["64", "--attention-backend", "torch"]
    args = [*dense, "--enable-double-sparsity", "--ds-channel-config-path", str(folder / "channels.json")]
    args += ["--ds-heavy-token-num", "24", "--ds-sparse-decode-threshold", "0"]
    with launched(folder, "cold", "server", *args, *ONE_THREAD, *POOL, "--disable-radix-cache") as server:
        server.wait_healthy()
        return Served(dense, args, answers(server, 1))


def answers(server: Launched, at_once: int = len(PROMPTS), cached: int = 0) -> list[list[int]]:
    """Return the output of each prompt. Prompts of several pages must find ``cached`` tokens in the cache."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(at_once) as pool:
        got = list(pool.map(lambda ids: server.generate(input_ids=ids, sampling_params=params), PROMPTS))
    assert all(answer["meta_info"]["cached_tokens"] >= cached for answer in got[:3])
    return [answer["output_ids"] for answer in got]


@pytest.mark.slow
def test_at_once_and_behind_cached_prompts(served: Served, tmp_path: Path) -> None:
    with launched(tmp_path, "unified", "server", *served.args, *ONE_THREAD, *POOL) as server:
        server.wait_healthy()
        for cached in (0, 112):
            assert answers(server, cached=cached) == served.expected
        [group] = server.info()["kv_layout"]["groups"]
        assert (group["kind"], group["label_dim"]) == ("sparse", 4)
    with launched(tmp_path, "dense", "server", *served.dense, *ONE_THREAD, *POOL) as server:
        server.wait_healthy()
        # Where few are chosen of many, others are what is likely.
        unlike = [ours != theirs for ours, theirs in zip(answers(server), served.expected, strict=True)]
        assert all(unlike[:3])


@pytest.mark.slow
def test_after_a_retraction(served: Served, tmp_path: Path) -> None:
    # What is recomputed is never found in the cache.
    bold = ("--schedule-conservativeness", "0.01", "--itl-budget-ms", "0")
    small = ("--max-total-tokens", "640", *bold, "--disable-radix-cache")
    with launched(tmp_path, "small", "server", *served.args, *ONE_THREAD, *small) as server:
        server.wait_healthy()
        assert answers(server) == served.expected
        assert server.info()["retractions"] > 0


@pytest.mark.slow
def test_by_a_pair(served: Served, tmp_path: Path) -> None:
    with pd_pair(tmp_path, "tcp", *served.args, *POOL) as pair:
        for _ in range(2):
            assert answers(pair.router) == served.expected
        assert pair.decode.info()["disaggregation"]["received"]["done"] == 2 * len(PROMPTS)
        pair.assert_all_returned()
