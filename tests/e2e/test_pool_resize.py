"""KV pools of a pair shrink and grow while it hands over; some layers have windows. Its tokens are those of before, and
memory that is not used any more is the system's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers
from support.processes import Launched, pd_pair, wait_until
from support.tiny_model import CONFIG

MIB = 2**20
TOKENS = 64
ARGS = ("--load-format", "dummy", "--tokenizer-path", "smollm2", "--dtype", "float32", "--chunked-prefill-size", "64")
SHARED = [(7 * i * i + 3) % 900 + 50 for i in range(200)]
PROMPTS = [[*SHARED[: 20 * i + 16], *((13 * i + j) % 700 + 60 for j in range(40 + 7 * i))] for i in range(8)]
LIMIT = 131072


def answer(server: Launched, prompt: list[int]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return server.generate(input_ids=prompt, sampling_params=params)["output_ids"]


def resize(server: Launched, tokens: int, wait_s: float = 10.0) -> dict:
    resized = server.post("/kv/resize", {"max_total_tokens": tokens, "wait_s": wait_s})
    assert resized.status_code == 200, resized.text
    return resized.json()


# The simulated world of tests/unit/harness/test_world.py has resized pools in make test.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_pair_hands_over_while_its_pools_change(tmp_path: Path, backend: str) -> None:
    config = transformers.Gemma3TextConfig(
        **CONFIG | {"num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 40},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        architectures=["Gemma3ForCausalLM"],
    )
    config.save_pretrained(tmp_path / "model")
    sizes = ["--max-total-tokens", "2048", "--max-total-tokens-limit", str(LIMIT)]
    with pd_pair(tmp_path, backend, "--model-path", str(tmp_path / "model"), *ARGS, *sizes) as pair:
        assert f"2048 tokens of 0.5 KiB, in pages of 16, up to {LIMIT} of them" in pair.decode.log()
        expected = [answer(pair.router, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            streams: list[tuple[int, Future[list[int]]]] = []
            for tokens in (6144, 512, 3072, 1024) * 3:
                streams += [(i, pool.submit(answer, pair.router, prompt)) for i, prompt in enumerate(PROMPTS)]
                for server in (pair.prefill, pair.decode):
                    assert resize(server, tokens, 30.0)["max_total_tokens"] == tokens
                    pool_now = server.info()["pool"]
                    assert (pool_now["total"], pool_now["most"]) == (tokens, LIMIT)
            for i, stream in streams:
                assert stream.result() == expected[i]
        assert pair.decode.info()["disaggregation"]["received"]["done"] > len(PROMPTS)
        pair.assert_all_returned()
        memory_goes_back(pair.decode, lambda: answer(pair.router, PROMPTS[0]) == expected[0])
        pair.assert_all_returned()


def memory_goes_back(server: Launched, is_right: Callable[[], bool]) -> None:
    """Check that the system gets back what a larger pool has committed when it is small again."""
    worker = server.family()["worker"]
    least = worker.memory_info().rss
    assert resize(server, LIMIT)["before"] == 1024
    # It commits all of its 64 MiB ahead of use, by and by.
    assert is_right()
    wait_until(lambda: worker.memory_info().rss > least + 48 * MIB, 20, "the larger pool is committed")
    resized = resize(server, 1000)
    assert resized["max_total_tokens"] == 992
    assert resized["freed_bytes"] > 44 * MIB
    assert worker.memory_info().rss < least + 8 * MIB
    assert is_right()
    assert server.post("/kv/resize", {"max_total_tokens": LIMIT + 16}).status_code == 400
    refused = server.post("/generate", {"input_ids": [5] * 1000})
    assert (refused.status_code, "the KV pool holds 992" in refused.text) == (400, True)
