"""Memory given back and taken again by real instances: alone, and as a half of a pair that keeps its peer."""

from __future__ import annotations

import itertools

import pytest
from support.processes import ONE_THREAD, Launched, launched, pd_pair, wait_until
from support.tiny_model import CONFIG, tiny_args

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
MIB = 2**20
PROMPT = [(7 * i) % 90 + 3 for i in range(300)]


def ask(server: Launched, tokens: list[int] = PROMPT) -> tuple[list[int], int]:
    """Return the output, and how many of the prompt's tokens were cached."""
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.generate(input_ids=tokens, sampling_params=sampling)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def resident(server: Launched) -> int:
    return server.family()["worker"].memory_info().rss


# Unit tests have the parts: test_worker_memory_saver.py gives real memory back, scheduler/test_memory_saver.py refuses
# requests meanwhile, and test_http_admin.py has the answers.
@pytest.mark.slow
def test_an_instance_without_its_memory_says_so_and_answers_as_before_with_it(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    args = tiny_args(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    with launched(tmp_path, "i", "server", *ONE_THREAD, *args, "--max-total-tokens", "65536") as server:
        server.wait_healthy()
        log = server.log()
        assert "KV pool" in log
        assert "requests of the whole context" in log
        use = server.info()["memory"]
        assert use["kv_pool"] > 96 * MIB < use["weights"]
        assert use["full_requests"] == 65536 / CONFIG["max_position_embeddings"]
        before, _ = ask(server)
        full = resident(server)
        assert server.post(RESUME, {}).status_code == 409
        answer = server.post(RELEASE, {"tags": ["kv_cache", "weights"]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["released"] == ["kv_cache", "weights"]
        # What of the pool was committed (ahead of use), and all of the weights.
        assert full - resident(server) > 0.9 * use["weights"]
        assert answer.json()["freed_bytes"] > 0.9 * use["weights"]
        refused = server.post("/generate", {"input_ids": PROMPT})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        # The scheduler's next heartbeat tells HTTP.
        wait_until(lambda: server.client.get(server.url + "/health").status_code == 503, 5, "/health says so")
        health = server.client.get(server.url + "/health")
        assert "/resume_memory_occupation takes it again" in health.json()["error"]["message"]
        assert server.info()["memory"]["state"] == "released"
        wait_until(
            lambda: (
                'pdserve_memory_released{role="unified",tag="weights"} 1.0'
                in server.client.get(server.url + "/metrics").text
            ),
            5,
            "metrics tell",
        )
        again = server.post(RELEASE, {"tags": ["weights"]})
        assert (again.status_code, "given back already" in again.text) == (409, True)
        unknown = server.post(RELEASE, {"tags": ["cuda_graph"]})
        assert (unknown.status_code, "kv_cache" in unknown.text) == (400, True)
        back = server.post(RESUME, {})
        assert (back.status_code, back.json()["released"]) == (200, [])
        server.wait_healthy(5)
        assert ask(server) == (before, 0)
        assert ask(server)[1] == 288
        # The cache outlives weights that were away.
        assert server.post(RELEASE, {"tags": ["weights"], "wait_s": 10}).status_code == 200
        assert server.post(RESUME, {"tags": ["weights"]}).status_code == 200
        assert ask(server) == (before, 288)
        assert server.info()["invariants"] == "ok"


@pytest.mark.slow
def test_ranks_give_back_their_parts(tmp_path, tiny_args) -> None:
    sizes = ("--max-total-tokens", "4096", "--max-total-tokens-limit", "16384")
    with launched(tmp_path, "i", "server", *tiny_args, "--tp-size", "2", *sizes) as server:
        server.wait_healthy()
        before = ask(server)
        for tags in (["weights"], ["kv_cache"], ["kv_cache", "weights"]):
            assert server.post(RELEASE, {"tags": tags}).status_code == 200
            assert server.post(RESUME, {}).status_code == 200
            assert ask(server)[0] == before[0]
        for tokens in (1024, 16384, 4096):
            assert server.post("/kv/resize", {"max_total_tokens": tokens}).json()["max_total_tokens"] == tokens
            assert ask(server)[0] == before[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp", "nixl"])
def test_a_pair_parts_and_finds_itself_again(tmp_path, tiny_args, backend: str) -> None:
    if backend == "nixl":
        pytest.importorskip("nixl_cu12")
    with pd_pair(tmp_path, backend, *tiny_args, router_args=["--health-check-interval", "0.2"]) as pair:
        before, _ = ask(pair.router)
        handed = pair.decode.info()["disaggregation"]["received"]["done"]
        assert handed == 1
        firsts = itertools.count(3)
        for server in (pair.decode, pair.prefill):
            # The last hand-over's end may be on its way yet.
            answer = server.post(RELEASE, {"wait_s": 20})
            assert answer.status_code == 200, answer.text
            assert server.info()["disaggregation"]["peers"] == []
            refused = pair.router.post("/generate", {"input_ids": PROMPT})
            assert refused.status_code in (200, 503)  # the remaining instance may do it alone
            assert server.post(RESUME, {}).status_code == 200
            wait_until(pair.router.is_healthy, 10, "the router has both again")
            server.wait_healthy(5)

            def goes_over() -> bool:
                """Return whether a new prompt was handed over. A cached prompt may be computed where its KV is."""
                count, prompt = pair.decode.info()["disaggregation"]["received"]["done"], [next(firsts), *PROMPT]
                output, _ = ask(pair.router, prompt)
                assert ask(pair.router, prompt)[0] == output
                return pair.decode.info()["disaggregation"]["received"]["done"] > count

            wait_until(goes_over, 20, "KV is handed over again")
        assert ask(pair.router)[0] == before
        pair.assert_all_returned()
