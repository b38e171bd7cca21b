"""``--kv-debug`` on real servers: nothing differs where nothing is wrong, and what was changed on purpose is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes import Launched, pd_pair, wait_until

from pdserve.mem_cache.storage.frame import HEADER_BYTES, header

PROMPT = [(7 * i) % 90 + 3 for i in range(700)]
OTHER = PROMPT[::-1]
PAGES = len(PROMPT) // 16


def ask(server: Launched, tokens: list[int], count: int = 8) -> list[int]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return server.generate(input_ids=tokens, sampling_params=sampling)["output_ids"]


def compared(server: Launched) -> dict[str, int]:
    return server.info()["kv_debug"]["compared_pages"]


def mismatches(server: Launched) -> dict[str, int]:
    """Return the places with differences. Torch's repeated computations need not agree to the last bit."""
    found = server.info()["kv_debug"]["mismatches"]
    return {place: count for place, count in found.items() if count and place != "prefill"}


def hashes(server: Launched, tokens: list[int]) -> dict:
    response = server.post("/kv/hashes", {"input_ids": tokens})
    assert response.status_code == 200, response.text
    return response.json()


def change_a_page(folder: Path) -> None:
    """Change a bit at the end of a page, under a checksum that is right."""
    path = next(folder.rglob("*.page"))
    framed = path.read_bytes()
    page = bytearray(framed[HEADER_BYTES:])
    page[-1] ^= 1
    path.write_bytes(header(framed[8:24], memoryview(page)) + page)


@pytest.mark.slow
def test_kv_is_the_same_wherever_it_goes_and_a_store_that_lies_is_named(tmp_path, tiny_args):
    """The prefill has torch's order, the decode that of the CPU kernels; behind the prefill are host and store."""
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    tier = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-url", str(folder)]
    tier += ["--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "1024"]
    args = [*tiny_args, "--kv-debug"]
    with pd_pair(tmp_path, "tcp", *args, prefill_args=["--attention-backend", "torch", *tier]) as pair:
        prefill = pair.prefill
        answer = ask(pair.router, PROMPT)
        assert compared(pair.decode)["transfer"] == PAGES
        ask(prefill, OTHER)
        assert ask(prefill, PROMPT) == answer
        assert ask(prefill, PROMPT) == answer
        tiers = lambda: prefill.info()["tiers"]  # noqa: E731
        wait_until(lambda: not tiers()["backlog"] and tiers()["stored"] >= 2 * PAGES, 20, "all is stored")
        prefill.post("/flush_cache", {})
        assert ask(prefill, PROMPT) == answer
        seen = compared(prefill)
        assert seen["host"] > 0
        assert (seen["host"] + seen["reuse"], seen["store"]) == (2 * PAGES, PAGES)
        assert mismatches(prefill) == mismatches(pair.decode) == {}
        here, there = (hashes(server, PROMPT[: 16 * PAGES]) for server in (prefill, pair.decode))
        assert here["cached_tokens"] == there["cached_tokens"] == 16 * PAGES
        assert here["layers"] == there["layers"]

        change_a_page(folder)
        for tokens in (PROMPT, OTHER):
            prefill.post("/flush_cache", {})
            ask(prefill, tokens)
        assert mismatches(prefill) == {"store": 1}
        lines = [line for line in prefill.log().splitlines() if " E " in line and "KV differs" in line]
        pattern = (
            r"page \d+ \(tokens \d+ to \d+\), layer \d+, V: \w{16} back from the store, \w{16} when it was computed"
        )
        assert [bool(re.search(pattern, line)) for line in lines] == [True]
        # The health check says for a while what it said last.
        wait_until(
            lambda: ", V: " in prefill.client.get(prefill.url + "/health").json().get("warning", ""), 10, "reported"
        )
        metrics = prefill.client.get(prefill.url + "/metrics").text
        assert 'pdserve_kv_debug_mismatches_total{place="store",role="prefill"} 1.0' in metrics


@pytest.mark.slow
def test_what_never_arrived_is_found_and_computed(tmp_path, tiny_args):
    """A backend that moves nothing, and no checksum that would notice."""
    args = [*tiny_args, "--kv-debug", "--disable-handover-checksum"]
    with pd_pair(tmp_path, "fake", *args) as pair:
        answer = ask(pair.router, PROMPT)
        assert set(mismatches(pair.decode)) == {"transfer"}
        assert ask(pair.prefill, PROMPT) == answer
