"""Hand-over between instances that compute differently.

They are torch and the CPU kernels, with pages of different orders, and two levels of the kernels, as on two kinds of
processors.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import ONE_THREAD, Launched, launched, pd_pair

from pdserve.model_runner.cpu_engine.build import ISA_VARIABLE, levels_here

pytestmark = pytest.mark.timeout(300)

ENGINES = {"torch": ("--attention-backend", "torch"), "cpu": ("--attention-backend", "cpu")}
# Less than a page, whole pages, and some with a rest.
LENGTHS = (5, 48, 100)


def outputs(server: Launched) -> list[list[int]]:
    prompts = [[(7 * i + 3 * length) % 49152 for i in range(length)] for length in LENGTHS]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return [server.generate(input_ids=ids, sampling_params=sampling)["output_ids"] for ids in prompts]


def crowd_of(server: Launched, at_once: int) -> list[list[int]]:
    """Return the outputs of eight different prompts, which are 800 tokens in the end."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    prompts = [[(7 * i + 31 * first + 5) % 49152 for i in range(40)] for first in range(8)]
    with ThreadPoolExecutor(at_once) as clients:
        answers = clients.map(lambda ids: server.generate(input_ids=ids, sampling_params=sampling), prompts)
        return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def reference(alone: Launched) -> list[list[int]]:
    return outputs(alone)


# test_latent_attention.py has a pair of two engines in make test.
@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "page_size"), [("torch", "cpu", "16"), ("cpu", "torch", "1")])
def test_float32_gives_the_tokens_of_one_instance(tmp_path, tiny_args, reference, prefill, decode, page_size) -> None:
    args = (*tiny_args, "--page-size", page_size)
    own = {"prefill_args": ENGINES[prefill], "decode_args": ENGINES[decode]}
    with pd_pair(tmp_path, "tcp", *args, **own) as pair:
        assert outputs(pair.router) == reference
        orders = [server.info()["kv_layout"]["order"] for server in (pair.prefill, pair.decode)]
        assert sorted(orders) == ["blocks", "tokens"]
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(LENGTHS)
        pair.assert_all_returned()


# tests/unit/model_runner/test_kv_quantization.py and the kernels' tests have both types, retractions and other orders
# of pages.
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_quantised_kv_gives_the_tokens_of_one_instance(tmp_path, tiny_args, kv_dtype) -> None:
    """Computed at once, again from the prefix cache, and where memory is so short that requests are retracted."""
    args, short = (*tiny_args, "--kv-cache-dtype", kv_dtype), ("--max-total-tokens", "256")
    with launched(tmp_path, "unified", "server", *args, *ENGINES["cpu"], *ONE_THREAD) as server:
        server.wait_healthy()
        reference = outputs(server)
        assert outputs(server) == reference
        crowd = crowd_of(server, at_once=1)
        assert server.info()["kv_layout"]["groups"][0]["scale_dtype"] == "float32"
    bold = ("--schedule-conservativeness", "0.01", "--itl-budget-ms", "0")
    with launched(tmp_path, "small", "server", *args, *ENGINES["cpu"], *ONE_THREAD, *short, *bold) as server:
        server.wait_healthy()
        assert crowd_of(server, at_once=8) == crowd
        assert server.info()["retractions"] > 0
    own = {"prefill_args": ENGINES["torch"], "decode_args": ENGINES["cpu"]}
    with pd_pair(tmp_path, "tcp", *args, **own) as pair:
        assert outputs(pair.router) == outputs(pair.router) == reference
        assert pair.decode.info()["disaggregation"]["received"]["done"] == 2 * len(LENGTHS)
        pair.assert_all_returned()


# The lowest level is compiled first, which takes longer than all the rest of this file.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefill_of_the_lowest_level_hands_over_to_the_best(tmp_path, tiny_args, reference, dtype) -> None:
    args = [*tiny_args[: tiny_args.index("--dtype")], "--dtype", dtype]
    best, lowest = levels_here()[0].name, levels_here()[-1].name
    # The decode's level is that of the whole test run, which is the best one unless it is told otherwise.
    with pd_pair(tmp_path, "tcp", *args, prefill_env={ISA_VARIABLE: lowest}) as pair:
        got = outputs(pair.router)
        assert [len(ids) for ids in got] == [24] * len(LENGTHS)
        # In bfloat16 they round in different places, so the tokens may differ; the hand-over is the same.
        assert dtype == "bfloat16" or got == reference
        levels = [server.info()["machine"]["kernel_level"] for server in (pair.prefill, pair.decode)]
        assert levels == [lowest, os.environ.get(ISA_VARIABLE) or best]
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(LENGTHS)
        pair.assert_all_returned()


@pytest.mark.slow
def test_bfloat16_is_accepted(tmp_path, tiny_args) -> None:
    args = [*tiny_args[: tiny_args.index("--dtype")], "--dtype", "bfloat16"]
    with pd_pair(tmp_path, "tcp", *args, prefill_args=ENGINES["cpu"], decode_args=ENGINES["torch"]) as pair:
        assert [len(ids) for ids in outputs(pair.router)] == [24] * len(LENGTHS)
        assert pair.decode.info()["disaggregation"]["received"]["done"] == len(LENGTHS)
