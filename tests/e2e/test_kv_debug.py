"""``--kv-debug`` on real servers: nothing differs where nothing is wrong, and what was changed on purpose is named."""

from __future__ import annotations

import re

from support.processes import ONE_THREAD, launched, wait_until

from pdserve.mem_cache.storage.frame import HEADER_BYTES, header

PROMPT = [(7 * i) % 90 + 3 for i in range(700)]


def ask(server, tokens: list[int], count: int = 8) -> list[int]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return server.generate(input_ids=tokens, sampling_params=sampling)["output_ids"]


def found(server) -> dict:
    return server.info()["kv_debug"]


def change_a_page(folder) -> int:
    """Another bit at the end of a page, under a checksum that is right."""
    path = sorted(folder.rglob("*.page"))[0]
    framed = path.read_bytes()
    page = bytearray(framed[HEADER_BYTES:])
    page[-1] ^= 1
    path.write_bytes(header(framed[8:24], memoryview(page)) + page)
    return 1


def test_what_a_store_brings_back_is_compared(tmp_path, tiny_args):
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    tier = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-url", str(folder)]
    args = [*ONE_THREAD, *tiny_args, "--max-total-tokens", "1024", *tier, "--kv-debug"]
    with launched(tmp_path, "i", "server", *args, "--hicache-storage-prefetch-policy", "wait_complete") as server:
        server.wait_healthy()
        answer = ask(server, PROMPT)
        ask(server, PROMPT[::-1])
        assert ask(server, PROMPT) == answer  # from the host
        assert ask(server, PROMPT) == answer  # from the pool
        wait_until(
            lambda: not server.info()["tiers"]["backlog"] and server.info()["tiers"]["stored"] >= 86, 20, "stored"
        )
        server.post("/flush_cache", {})
        assert ask(server, PROMPT) == answer
        compared = found(server)["compared_pages"]
        assert compared["host"] >= 16, compared
        assert (compared["reuse"], compared["store"]) == (43 + 43 - compared["host"], 43), compared
        assert not any(found(server)["mismatches"].values())
        change_a_page(folder)
        for tokens in (PROMPT, PROMPT[::-1]):
            server.post("/flush_cache", {})
            ask(server, tokens)
        assert found(server)["mismatches"] == {**dict.fromkeys(compared, 0), "store": 1}
        # The health check says for a while what it said last.
        wait_until(lambda: ", V: " in server.client.get(server.url + "/health").json().get("warning", ""), 10, "told")
        metrics = server.client.get(server.url + "/metrics").text
        assert 'pdserve_kv_debug_mismatches_total{place="store",role="unified"} 1.0' in metrics
        [line] = [line for line in server.log().splitlines() if "KV differs" in line]
        assert re.search(
            r" E .*page \d+ \(tokens \d+ to \d+\), layer \d+, V: \w{16} back from the store, \w{16} when it was", line
        )
