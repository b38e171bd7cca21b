"""KV that outlives pool and server: a conversation goes on from the store, after kill -9 and at another instance.

``test_store_faults.py`` damages and ends stores in ``make test``; here a slow test does so with each.
"""

from __future__ import annotations

import signal

import pytest
from support.processes import ONE_THREAD, free_ports, launched, wait_until
from support.redis_server import SERVER, RedisServer, redis_server

PROMPT = [(7 * i) % 90 + 3 for i in range(700)]
POOL = ["--max-total-tokens", "1024", "--hicache-storage-prefetch-policy", "wait_complete"]


def ask(server, tokens: list[int], count: int = 8) -> dict:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return server.generate(input_ids=tokens, sampling_params=sampling)


def tiers(server) -> dict:
    return server.info()["tiers"]


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.slow)])
def store(request, tmp_path):
    """The options that name one."""
    if request.param == "file":
        (tmp_path / "kv").mkdir(mode=0o700)
        (tmp_path / "key").write_text("k" * 32)
        yield ["file", str(tmp_path / "kv"), "--hicache-storage-key-file", str(tmp_path / "key")]
    elif SERVER is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    else:
        with redis_server(tmp_path) as url:
            yield ["redis", url]


def args(tiny_args, kind: str, url: str, *sealed: str) -> list[str]:
    tier = ["--enable-hierarchical-cache", "--hicache-storage-backend", kind, "--hicache-storage-url", url]
    return [*ONE_THREAD, *tiny_args, *POOL, *tier, *sealed]


def test_a_conversation_goes_on_after_a_kill(tmp_path, tiny_args, alone, store):
    with launched(tmp_path, "first", "server", *args(tiny_args, *store)) as first:
        first.wait_healthy()
        answer = ask(first, PROMPT)
        assert answer["meta_info"]["cached_tokens"] == 0
        # What displaces it goes to the host, and comes back from there.
        ask(first, PROMPT[::-1])
        again = ask(first, PROMPT)
        assert again["output_ids"] == answer["output_ids"]
        assert again["meta_info"]["cached_tokens"] == 688
        assert tiers(first)["loaded"] > 0
        wait_until(lambda: not tiers(first)["backlog"] and tiers(first)["stored"] >= 86, 20, "all is stored")
        first.stop(signal.SIGKILL)
    with launched(tmp_path, "second", "server", *args(tiny_args, *store)) as server:
        server.wait_healthy()
        turn = PROMPT + answer["output_ids"] + [5, 6, 7]
        found = ask(server, turn)
        assert found["meta_info"]["cached_tokens"] >= 688
        assert tiers(server)["fetched"] >= 43
        server.post("/flush_cache", {})
        wait_until(lambda: server.info()["invariants"] == "ok", 15, "checked")
    assert ask(alone, turn)["output_ids"] == found["output_ids"]


@pytest.mark.slow
def test_a_dead_store_costs_nothing_but_time(tmp_path, tiny_args):
    pytest.importorskip("redis")
    [port] = free_ports(1)
    with launched(tmp_path, "i", "server", *args(tiny_args, "redis", f"redis://127.0.0.1:{port}/0")) as server:
        server.wait_healthy()
        first = ask(server, PROMPT)
        for i in range(4):
            ask(server, [i + 3, *PROMPT[:300]])
        assert ask(server, PROMPT)["output_ids"] == first["output_ids"]
        assert tiers(server)["store"]["breaker"] == "open"
        assert "Redis" in tiers(server)["store"]["reason"]


@pytest.mark.slow
def test_what_a_store_damaged_is_computed(tmp_path, tiny_args):
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    with launched(tmp_path, "first", "server", *args(tiny_args, "file", str(folder))) as first:
        first.wait_healthy()
        answer = ask(first, PROMPT)
        wait_until(lambda: not tiers(first)["backlog"] and tiers(first)["stored"] >= 43, 20, "all is stored")
    for path in folder.rglob("*.page"):
        framed = bytearray(path.read_bytes())
        framed[-1] ^= 1
        path.write_bytes(framed)
    with launched(tmp_path, "second", "server", *args(tiny_args, "file", str(folder))) as second:
        second.wait_healthy()
        found = ask(second, PROMPT)
        assert (found["output_ids"], found["meta_info"]["cached_tokens"]) == (answer["output_ids"], 0)
        wait_until(lambda: tiers(second)["store"]["bad_pages"] > 0, 10, "it is reported")


@pytest.mark.slow
def test_a_store_that_comes_back_gets_what_it_missed_without_requests(tmp_path, tiny_args):
    if SERVER is None:
        pytest.skip("redis-server is not installed (Debian: redis-server)")
    redis = RedisServer(tmp_path)
    try:
        with launched(tmp_path, "i", "server", *args(tiny_args, "redis", redis.url)) as server:
            server.wait_healthy()
            ask(server, PROMPT)

            def warning() -> str:
                return server.client.get(server.url + "/health").raise_for_status().json().get("warning", "")

            wait_until(lambda: "KV store" in warning(), 10, "it is reported")
            metrics = server.client.get(server.url + "/metrics").text
            assert 'pdserve_kv_store_state{role="unified",state="open"} 1.0' in metrics
            redis.start()
            wait_until(lambda: not warning(), 10, "it is well again")
            wait_until(lambda: tiers(server)["stored"] >= 43, 10, "it has what it missed")
    finally:
        redis.kill()
        redis.client.close()


@pytest.mark.slow
def test_ranks_of_one_host_share_the_tiers(tmp_path, tiny_args):
    """Their pool is one memory; a page is all of theirs, in host memory and in a store."""
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    flags = [*args(tiny_args, "file", str(folder))[len(ONE_THREAD) :], "--threads", "2", "--tp-size", "2"]
    with launched(tmp_path, "first", "server", *flags) as first:
        first.wait_healthy()
        answer = ask(first, PROMPT)
        ask(first, PROMPT[::-1])
        again = ask(first, PROMPT)
        assert again["output_ids"] == answer["output_ids"]
        found = again["meta_info"]["cached_tokens_details"]
        assert (found["device"] + found["host"], found["storage"]) == (688, 0)
        assert found["host"] >= 320  # the pool of 1,024 tokens has had 1,400 since
        wait_until(lambda: not tiers(first)["backlog"] and tiers(first)["stored"] >= 86, 20, "all is stored")
        first.stop(signal.SIGKILL)
    with launched(tmp_path, "second", "server", *flags) as second:
        second.wait_healthy()
        found = ask(second, PROMPT)
        assert found["output_ids"] == answer["output_ids"]
        assert found["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 688}
        wait_until(lambda: second.info()["invariants"] == "ok", 15, "checked")
    with launched(tmp_path, "alone", "server", *ONE_THREAD, *tiny_args, "--max-total-tokens", "1024") as alone:
        alone.wait_healthy()
        assert ask(alone, PROMPT)["output_ids"] == answer["output_ids"]
