"""The load generators of other servers count our tokens as we do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.clients import ENV, MODEL, counters, python_of, run_client
from support.processes import Pair

BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""What ``vllm bench serve`` does. The package for CPUs has another name, by which its command line finds no version."""
PROMPTS = 12
TOKENS = 16

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_sglang_bench_serving(pair: Pair, model_folder: Path, tmp_path: Path, backend: str) -> None:
    """``sglang`` is its native API, ``/generate``; the others are OpenAI's."""
    before = counters(pair)
    out = tmp_path / "out.jsonl"
    host, port = "127.0.0.1", str(pair.router.port)
    run_client(
        [
            *(python_of("sglang"), "-m", "sglang.bench_serving", "--backend", backend, "--host", host, "--port", port),
            *("--model", model_folder, "--served-model-name", MODEL, "--tokenizer", model_folder),
            *("--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", str(TOKENS)),
            *("--random-range-ratio", "1.0", "--num-prompts", str(PROMPTS), "--max-concurrency", "4"),
            *("--warmup-requests", "1", "--output-file", out, "--disable-tqdm"),
        ]
    )
    report = json.loads(out.read_text().splitlines()[-1])
    assert report["completed"] == PROMPTS
    assert report["total_output_tokens"] == PROMPTS * TOKENS
    after = counters(pair)
    # Its warm-up is a request too, of at most as many tokens.
    made = after["generation_tokens"] - before["generation_tokens"]
    assert 0 <= made - PROMPTS * TOKENS <= 2 * TOKENS


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(pair: Pair, model_folder: Path, tmp_path: Path, backend: str) -> None:
    before = counters(pair)
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    run_client(
        [
            *(python_of("vllm"), "-c", BENCH_SERVE, "--backend", backend),
            *("--base-url", pair.router.url, "--endpoint", path, "--model", model_folder),
            *("--served-model-name", MODEL, "--tokenizer", model_folder, "--dataset-name", "random"),
            *("--random-input-len", "64", "--random-output-len", str(TOKENS), "--num-prompts", str(PROMPTS)),
            *("--max-concurrency", "4", "--ignore-eos", "--save-result", "--result-dir", tmp_path),
        ]
    )
    [result] = tmp_path.glob("*.json")
    report = json.loads(result.read_text())
    assert report["completed"] == PROMPTS
    assert report["total_output_tokens"] == PROMPTS * TOKENS
    after = counters(pair)
    made = after["generation_tokens"] - before["generation_tokens"]
    assert 0 <= made - PROMPTS * TOKENS <= 4 * TOKENS


def test_environments_are_of_the_versions_that_are_pinned() -> None:
    for name, package in (("sglang", "sglang"), ("vllm", "vllm"), ("gateways", "smg")):
        pinned = re.search(rf"{package}[\w-]*==([\d.]+)", (ENV / f"{name}.txt").read_text())
        assert pinned, name
