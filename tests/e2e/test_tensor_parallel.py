"""Instances of several tensor-parallel ranks: the same answers as one rank's, also across a hand-over between unlike
sizes, and one death for all.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.import_path import with_inherited
from support.machine import limit
from support.processes import ONE_THREAD, Launched, launched, pd_pair, wait_until
from support.prompts import FOX, FRANCE, STACK

TOKENS = 12
FEW = 8
"""Tokens of a model with a long pass, with more ranks than there may be cores."""
TWO = ("--tp-size", "2")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 5},
    "penalised": {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "scored": {"temperature": 0, "logprobs": 2},
}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tiny_args: list[str]) -> list[str]:
    return tiny_args


def prompts() -> list[list[int]]:
    """Return prompts of less than a page, of a few pages, and of several chunks."""
    return [[(7 * i * i + 13 * i + n) % 40000 + 10 for i in range(length)] for n, length in enumerate((5, 33, 90, 700))]


def body(ids: list[int], setting: str) -> dict[str, Any]:
    asked = dict(SETTINGS[setting])
    more: dict[str, Any] = {}
    if logprobs := asked.pop("logprobs", None):
        more = {"return_logprob": True, "top_logprobs_num": logprobs, "logprob_start_len": 0}
    return {"input_ids": ids, "sampling_params": asked | {"max_new_tokens": TOKENS, "ignore_eos": True}, **more}


def answers(server: Launched) -> list[list[int]]:
    """Return the output of every prompt in every setting, all asked at once."""
    asked = [body(ids, setting) for setting in SETTINGS for ids in prompts()]
    with ThreadPoolExecutor(len(asked)) as pool:
        return [answer["output_ids"] for answer in pool.map(lambda b: server.generate(**b), asked)]


@pytest.fixture(scope="module")
def expected(alone: Launched) -> list[list[int]]:
    found = answers(alone)
    assert len({tuple(ids) for ids in found}) > len(prompts())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "victim"), [("cpu", "worker-1"), ("torch", "worker")])
def test_two_ranks_answer_as_one_and_the_death_of_one_is_the_instances(
    engine: str, victim: str, model: list[str], expected: list[list[int]], tmp_path: Path
) -> None:
    with launched(tmp_path, "two", "server", *model, *TWO, "--attention-backend", engine) as server:
        server.wait_healthy()
        assert {"worker", "worker-1"} <= server.family().keys()
        assert answers(server) == expected
        # And again, from the prefix cache.
        assert answers(server) == expected
        wait_until(lambda: server.info()["pool"]["in_use"] == 0, 10, "no slot in use")
        assert server.info()["invariants"] == "ok"
        assert_one_death_is_the_instances(server, victim)


def assert_one_death_is_the_instances(server: Launched, victim: str) -> None:
    family = server.family()
    family[victim].send_signal(signal.SIGKILL)
    wait_until(lambda: server.process is not None and server.process.poll() is not None, 5, "the instance ends")
    assert server.process.returncode == 1
    assert f"process {victim} was killed by SIGKILL; the instance stops" in server.log().splitlines()[-1]
    assert not [process for process in family.values() if process.is_running() and not is_zombie(process)]


def is_zombie(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_ranks_with_a_device_each_answer_as_one(
    model: list[str], expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording devices play the part of GPUs: a pool each, graphs that hold the exchanges, one step ahead."""
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", with_inherited(tests / "support" / "fake_devices", tests))
    graphs = ("--attention-backend", "torch", "--cuda-graph-max-bs", "2", "--context-length", "1024")
    with launched(tmp_path, "two", "server", *model, *TWO, *graphs) as server:
        server.wait_healthy()
        assert answers(server) == expected
        for path in ("release", "resume"):
            server.client.post(f"{server.url}/{path}_memory_occupation", json={}).raise_for_status()
        assert answers(server) == expected
        assert server.log().count("captured 2 graphs of decode steps") == 4  # on each rank, and again
        assert "has not been tried on GPUs yet" in server.log()


@pytest.mark.parametrize(
    ("backend", "prefill", "decode"),
    [
        pytest.param("tcp", (), TWO, marks=pytest.mark.slow),
        pytest.param("tcp", TWO, ("--tp-size", "4"), marks=pytest.mark.slow),
    ],
)
def test_pairs_of_unlike_sizes(
    backend: str, prefill: tuple[str, ...], decode: tuple[str, ...], model: list[str], expected: Any, tmp_path: Path
) -> None:
    with pd_pair(tmp_path, backend, *model, prefill_args=prefill, decode_args=decode) as pair:
        assert answers(pair.router) == expected
        # All of it was computed there, and came as pages.
        assert pair.decode.info()["counters"]["prompt_tokens"] == 0
        pair.assert_all_returned()


def test_two_ranks_answer_as_one_beside_a_decode_of_one_rank_and_the_death_of_one_is_the_instances(
    model: list[str], expected: list[list[int]], tmp_path: Path
) -> None:
    """They answer by themselves, from the prefix cache again, and by a hand-over."""
    with pd_pair(tmp_path, "shm", *model, prefill_args=TWO) as pair:
        assert {"worker", "worker-1"} <= pair.prefill.family().keys()
        assert answers(pair.prefill) == expected
        assert answers(pair.prefill) == expected
        assert pair.prefill.post("/flush_cache", {}).status_code == 200
        assert answers(pair.router) == expected
        assert pair.decode.info()["counters"]["prompt_tokens"] == 0
        pair.assert_all_returned()
        assert_one_death_is_the_instances(pair.prefill, "worker-1")


@pytest.mark.slow
def test_three_ranks_of_a_published_model(tmp_path: Path) -> None:
    """SmolLM2 has nine heads, and three that keep KV. The file's own blocks are divided as well."""
    asked = [
        {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": FEW}} for text in (FRANCE, STACK, FOX)
    ]
    found = []
    for name, args in (("one", ("--tp-size", "1", *ONE_THREAD)), ("three", ("--tp-size", "3"))):
        with launched(tmp_path, name, "server", *args, "--dtype", "float32") as server:
            server.wait_healthy()
            found.append([server.generate(**b)["output_ids"] for b in asked])
            fingerprint = server.info()["fingerprint"]
    assert found[0] == found[1]
    with launched(tmp_path, "blocks", "server", "--tp-size", "3") as server:
        server.wait_healthy()
        assert "Paris" in server.generate(**asked[0])["text"]
        assert server.info()["fingerprint"] != fingerprint


# tests/unit/model_files/test_sharding.py has what is refused; here it is said by a real process.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tp-size", "3"), "--tp-size 3 does not divide the model's 4 query heads"),
        (("--tp-size", "2", "--model-impl", "transformers"), "can't be divided"),
    ],
)
def test_what_cant_be_divided_is_refused(args: tuple[str, ...], says: str, model: list[str], tmp_path: Path) -> None:
    with launched(tmp_path, "refused", "server", *model, *args) as server:
        assert server.process is not None
        assert server.process.wait(limit(60)) == 1
        assert says in server.log()
