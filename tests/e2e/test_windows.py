"""A model with windows behind real processes, unified and by a prefill-decode pair: pages behind the window go back, a
hand-over moves the last ones. Its tokens are those that transformers chooses, over contexts many windows long.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import transformers
from support.libraries import is_missing
from support.model_harness import draw_weights, greedy
from support.processes import ONE_THREAD, Launched, Pair, launched, pd_pair, wait_until
from support.reader import Reader
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
    return folder, [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def answers(server: Launched) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        got = pool.map(lambda ids: server.generate(input_ids=ids, sampling_params=params), PROMPTS)
        return [answer["output_ids"] for answer in got]


@pytest.mark.slow
def test_a_unified_server_gives_pages_back(served: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = served
    with launched(
        tmp_path, "unified", "server", "--model-path", str(folder), *ARGS, *ONE_THREAD, "--max-total-tokens", "2048"
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


def goes_on_from_a_store(folder: Path, tmp: Path, expected: list[list[int]]) -> list[int]:
    """Let one instance answer, kill it, and let another one answer from its store.

    Returns the bytes of a page by group.
    """
    store = tmp / "kv"
    args = ["--model-path", str(folder), *ARGS, "--max-total-tokens", "2048", "--enable-hierarchical-cache"]
    args += ["--hicache-storage-backend", "file", "--hicache-storage-url", str(store)]
    args += ["--hicache-storage-prefetch-policy", "wait_complete"]
    with launched(tmp, "first", "server", *args) as server:
        server.wait_healthy()
        assert answers(server) == expected
        wait_until(lambda: (t := server.info()["tiers"])["stored"] >= t["saved"] > 0, 20, "all is stored")
        server.stop(signal.SIGKILL)
    with launched(tmp, "second", "server", *args) as server:
        server.wait_healthy()
        assert answers(server) == expected
        wait_until(lambda: server.info()["invariants_steps_ago"] == 0, 15, "a check of the idle server")
        info = server.info()
        assert info["tiers"]["hit_store"] >= 300
        assert info["pool"]["in_use"] == info["pool"]["window_in_use"] == 0
        return [group["page_bytes"] for group in info["kv_layout"]["groups"]]


@pytest.mark.slow
def test_what_lies_behind_windows_outlives_the_server(served: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    assert min(goes_on_from_a_store(served[0], tmp_path, served[1])) > 0


@pytest.mark.slow
def test_so_it_does_where_all_layers_have_windows(tmp_path: Path) -> None:
    config = transformers.MistralConfig(**CONFIG | {"sliding_window": WINDOW}, attn_implementation="eager")
    model = draw_weights(transformers.MistralForCausalLM(config))
    model.save_pretrained(tmp_path / "model")
    expected = [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    none, some = goes_on_from_a_store(tmp_path / "model", tmp_path, expected)
    assert none == 0 < some


def pages_of(length: int, info: dict) -> tuple[int, int]:
    """Return the bytes that a prompt's hand-over moves of both groups, if nothing of it is cached."""
    kept, windowed = (group["page_bytes"] for group in info["kv_layout"]["groups"])
    size = info["kv_layout"]["page_size"]
    seen = -(-(WINDOW - 1) // size) + 1
    count = -(-length // size)
    return count * kept, min(count, seen) * windowed


@pytest.fixture(scope="module")
def pair(served: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with window_pair(tmp_path_factory.mktemp("pair"), "tcp", served[0], "cpu") as pair:
        yield pair


def window_pair(tmp: Path, backend: str, folder: Path, prefill: str) -> AbstractContextManager[Pair]:
    """Start a pair with pools that hold less than the prompts. The decode computes with the CPU kernels."""
    args = ("--model-path", str(folder), *ARGS, "--max-total-tokens", "2048")
    engines = {"prefill_args": prefill, "decode_args": "cpu"}
    return pd_pair(tmp, backend, *args, **{leg: ("--attention-backend", engine) for leg, engine in engines.items()})


def assert_the_last_window_is_moved(pair: Pair, expected: list[list[int]]) -> None:
    """Assert that windowed layers move as far as the decode sees, and that both give back what is behind."""
    for server in (pair.prefill, pair.decode):
        assert server.post("/flush_cache", {}).status_code == 200
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    first, second = PROMPTS[2], PROMPTS[2] + expected[2] + [9 * i + 50 for i in range(40)]
    before = pair.decode.info()["disaggregation"]["received"]

    def moved() -> int:
        return pair.decode.info()["disaggregation"]["received"]["bytes"] - before["bytes"]

    assert pair.router.generate(input_ids=first, sampling_params=params)["output_ids"] == expected[2]
    whole = sum(pages_of(len(first), pair.decode.info()))
    assert moved() == whole
    # What it has of the first is a prefix of this one, with the window before its end.
    answer = pair.router.generate(input_ids=second, sampling_params=params)
    assert answer["output_ids"] == pair.prefill.generate(input_ids=second, sampling_params=params)["output_ids"]
    cached = (len(first) + TOKENS - 1) // 16 * 16
    assert moved() - whole == sum(pages_of(len(second) - cached, pair.decode.info()))
    # A shorter prefix of it has no window any more.
    third = first[:200] + second[-30:]
    again = pair.router.generate(input_ids=third, sampling_params=params | {"n": 2})
    here = pair.prefill.generate(input_ids=third, sampling_params=params)
    assert [one["output_ids"] for one in again] == [here["output_ids"]] * 2
    for _ in range(2):
        assert answers(pair.router) == expected
    done = pair.decode.info()["disaggregation"]["received"]["done"] - before["done"]
    assert done == 3 + 2 * len(PROMPTS)
    for server in (pair.prefill, pair.decode):
        pool = server.info()["pool"]
        assert pool["window_total"] < sum(map(len, PROMPTS))
    pair.assert_all_returned()


# Unit tests move the pages: test_handover_pages.py and test_transfer_groups.py. test_window_models.py computes tokens.
@pytest.mark.slow
def test_a_pair_hands_over_the_last_window(pair: Pair, served: tuple[Path, list[list[int]]]) -> None:
    assert_the_last_window_is_moved(pair, served[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "prefill"), [("tcp", "torch"), ("shm", "cpu"), ("nixl", "cpu"), ("mooncake", "cpu")]
)
def test_other_pairs_hand_over_the_last_window(
    served: tuple[Path, list[list[int]]], tmp_path: Path, backend: str, prefill: str
) -> None:
    folder, expected = served
    if backend in ("nixl", "mooncake") and is_missing(backend):
        pytest.skip(f"{backend} is not installed here")
    with window_pair(tmp_path, backend, folder, prefill) as pair:
        assert_the_last_window_is_moved(pair, expected)


@pytest.mark.slow
def test_a_pair_of_a_model_whose_layers_all_have_windows(tmp_path: Path) -> None:
    """Full pages are mere numbers then, and nothing of them is moved."""
    config = transformers.MistralConfig(**CONFIG | {"sliding_window": WINDOW}, attn_implementation="eager")
    model = draw_weights(transformers.MistralForCausalLM(config))
    model.save_pretrained(tmp_path)
    args = ("--model-path", str(tmp_path), *ARGS, "--max-total-tokens", "2048")
    with pd_pair(tmp_path, "tcp", *args, prefill_args=("--attention-backend", "torch")) as pair:
        expected = [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
        assert answers(pair.router) == answers(pair.router) == expected
        info = pair.decode.info()
        assert [group["page_bytes"] > 0 for group in info["kv_layout"]["groups"]] == [False, True]
        assert 0 < info["disaggregation"]["received"]["bytes"] <= 2 * len(PROMPTS) * pages_of(400, info)[1]
        pair.assert_all_returned()


@pytest.mark.slow
def test_a_stream_moves_with_its_window(pair: Pair) -> None:
    """It moves to the prefill that its prompt came from, when it is many windows behind that."""
    params = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    asked = {"input_ids": FIRST[:150], "sampling_params": params}
    expected = pair.prefill.generate(**asked)["output_ids"]
    reader = Reader(pair.router.url, "/generate", asked | {"stream": True, "rid": "moves"})
    reader.start()
    reader.met(100)
    port = pair.prefill.info()["disaggregation"]["bootstrap_port"]
    to = {"rid": "moves", "bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    wait_until(lambda: pair.decode.post("/migrate", to).status_code == 200, 15, "it has moved")
    last = reader.ended()[-1]
    assert last["output_ids"] == expected
    assert pair.decode.info()["pool"]["window_in_use"] == 0
    pair.assert_all_returned()
