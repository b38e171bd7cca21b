"""A pair of instances that share a store: a decode fetches what the store has of a prompt instead of having it sent."""

from __future__ import annotations

import secrets
import signal

import pytest
from support import tiny_model
from support.processes import pd_pair, wait_until
from support.scrape import Page

TALKS = [[(number * 7919 + i * 31) % 90 + 3 for i in range(1500)] for number in range(3)]
SAMPLING = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


def ask(server, tokens: list[int]) -> dict:
    return server.generate(input_ids=tokens, sampling_params=SAMPLING)


@pytest.fixture(scope="module")
def slow_args(tmp_path_factory) -> list[str]:
    """A model of which a prompt takes longer to compute than to read."""
    folder = tmp_path_factory.mktemp("slow")
    return tiny_model.tiny_args(folder, hidden_size=256, intermediate_size=2048, num_hidden_layers=6)


# tests/unit/scheduler/test_store_first.py has the same rules in make test.
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "restarts"), [("tcp", False), ("tcp", True), ("shm", True)])
def test_a_conversation_goes_on_from_the_store_at_the_decode(tmp_path, slow_args, backend, restarts):
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "secret").write_text(secrets.token_urlsafe(32))
    secret = ["--cluster-secret-file", str(tmp_path / "secret")]
    tiers = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
    tiers += ["--hicache-storage-url", str(tmp_path / "kv"), "--hicache-storage-prefetch-policy", "wait_complete"]
    tiers += ["--hicache-storage-key-file", str(tmp_path / "secret")]
    auto = ["--disaggregation-threshold", "auto"]
    with pd_pair(tmp_path, backend, *slow_args, *secret, *tiers, *auto, router_args=secret) as pair:
        instances = (pair.prefill, pair.decode)
        said = [ask(pair.router, talk)["output_ids"] for talk in TALKS]
        turns = [[*talk, *answer, 5, 6, 7] for talk, answer in zip(TALKS, said, strict=True)]

        def is_stored() -> bool:
            stored = len(list((tmp_path / "kv").rglob("*.sealed"))) >= len(TALKS) * 93
            return stored and not any(server.info()["tiers"]["backlog"] for server in instances)

        wait_until(is_stored, 20, "all is stored")
        # No store has a say in these: a pool answers.
        expected = [ask(pair.prefill, turn)["output_ids"] for turn in turns]
        if restarts:
            for server in instances:
                server.stop(signal.SIGKILL)
            for server in instances:
                server.start()
            for server in (*instances, pair.router):
                server.wait_healthy()
        else:
            for server in instances:
                server.post("/flush_cache", {}).raise_for_status()
        answers = []

        def has_fetched() -> bool:
            # Whether a fetch is sooner is estimated from measurements: on a busy machine not for every prompt.
            if answers:
                for server in instances:
                    server.post("/flush_cache", {}).raise_for_status()
            now = [ask(pair.router, turn) for turn in turns]
            assert [answer["output_ids"] for answer in now] == expected
            answers.extend(now)
            return pair.decode.info()["disaggregation"]["store_first"]["came"] >= 1

        wait_until(has_fetched, 60, "a fetch from the store came")
        counts = pair.decode.info()["disaggregation"]["store_first"]
        assert counts["tokens"] >= 1488 * counts["came"]
        page = Page(pair.decode.client.get(pair.decode.url + "/metrics").text)
        assert page.total("pdserve_handover_fetches_total", outcome="came") == counts["came"]
        assert page.total("pdserve_handover_fetched_tokens_total") == counts["tokens"]
        details = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
        assert sum(cached.get("decode", cached)["storage"] for cached in details) >= counts["tokens"]
        pair.assert_all_returned()
