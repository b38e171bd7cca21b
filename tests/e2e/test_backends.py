"""Every transfer backend between real instances: the tokens of one instance, and streams that outlive their prefill."""

from __future__ import annotations

import itertools
import json
import os
import threading

import httpx
import pytest
from support.admin_key import as_admin
from support.fake_cuda_driver import IMPORT_PATH
from support.import_path import with_inherited
from support.libraries import is_missing
from support.machine import limit
from support.processes import ONE_THREAD, freeze, launched, pd_pair, wait_until
from support.reader import Reader
from support.scrape import Page

KINDS = ("tcp", "nixl", "mooncake", "shm", "cuda_ipc")
TOKENS = 24
CHUNKED = ("--chunked-prefill-size", "64")
LAYERED = ("--chunked-prefill-size", "256")
ONE_CHUNK = [(i * 23 + 5) % 40000 + 100 for i in range(250)]
SHARED = [(i * 7919) % 40000 + 100 for i in range(96)]
FOUR = [(i * 37 + 3) % 40000 + 100 for i in range(150)]
FRESH = [(i * 13 + 11) % 40000 + 100 for i in range(96)]
"""Prompt of which no instance holds anything."""
PROMPTS = {
    "whole": [[5, 6, 7], SHARED[:33]],
    "chunked": [[(i * 31 + 7) % 40000 + 100 for i in range(300)], [(i * 17 + 3) % 40000 + 100 for i in range(513)]],
    "prefix held": [[*SHARED, 9, 8, 7], [*SHARED, 5]],
}


@pytest.fixture
def kind(request, monkeypatch):
    if request.param == "cuda_ipc":
        monkeypatch.setenv("PYTHONPATH", with_inherited(IMPORT_PATH))
    elif is_missing(request.param):
        pytest.skip(f"{request.param} is not installed here")
    return request.param


def body(ids: list[int], tokens: int = TOKENS) -> dict:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def answered(server, tokens: int = TOKENS) -> dict[str, list]:
    """Return the output of each prompt, in order. The last ones find the KV of the first of them."""
    found = {what: [server.generate(**body(ids, tokens)) for ids in prompts] for what, prompts in PROMPTS.items()}
    return found | {"four answers": server.generate(**four(tokens))}


def four(tokens: int) -> dict:
    """Return the body of a request for several answers to a prompt that is not cached."""
    asked = body(FOUR, tokens)
    asked["sampling_params"] |= {"n": 4, "temperature": 0.8, "sampling_seed": 11}
    return asked


def outputs(answers: dict[str, list]) -> dict[str, list]:
    return {what: [answer["output_ids"] for answer in found] for what, found in answers.items()}


@pytest.fixture(scope="module")
def reference(alone):
    long = alone.generate(**body(FRESH, 400))["output_ids"]
    # Answers that don't depend on the prompt's KV would not tell wrong KV from right.
    assert long != alone.generate(**body([5, *FRESH[1:]], 400))["output_ids"]
    return outputs(answered(alone)), long


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nixl", "mooncake", "tcp", "cuda_ipc"], indirect=True)
def test_tokens_are_those_of_one_instance_and_streams_outlive_their_prefill(tmp_path, tiny_args, reference, kind):
    expected, long = reference
    with pd_pair(tmp_path, kind, *tiny_args, *CHUNKED) as pair:
        found = answered(pair.router)
        assert outputs(found) == expected
        moved = {what: [a["meta_info"]["timing"]["transfer_bytes"] for a in found[what]] for what in found}
        assert [bool(count) for count in moved.pop("four answers")] == [True, False, False, False]
        assert all(all(count) for count in moved.values())
        assert moved["prefix held"][1] < moved["prefix held"][0] / 3
        pair.assert_all_returned()
        outlive(pair, long)


SMALL = ("--kv-staging-size", "0.0004")
"""Room for a few pages of the tiny model in each direction, less than any of the long prompts has."""
STAGED = {
    "tcp, both": ("tcp", SMALL, SMALL),
    "shm, the decode": ("shm", (), SMALL),
    "tcp, the prefill, of torch's order": ("tcp", (*SMALL, "--attention-backend", "torch"), ()),
    "shm, both, of unlike orders": ("shm", SMALL, (*SMALL, "--attention-backend", "torch")),
    "nixl, both": ("nixl", SMALL, SMALL),
    "nixl, the decode, of unlike orders": ("nixl", (), (*SMALL, "--attention-backend", "torch")),
    "mooncake, both": ("mooncake", SMALL, SMALL),
    "mooncake, the prefill": ("mooncake", SMALL, ()),
}


# ``make test`` runs tcp and shm in most other files. Unit tests have the libraries between real processes, and cuda_ipc
# over memory of the host in a GPU's part. They have staged pools: test_kv_staging.py, test_transfer_random.py.
# test_failures.py has the death of a prefill, by real instances.
@pytest.mark.slow
@pytest.mark.parametrize("case", STAGED)
def test_tokens_are_the_same_through_host_memory_that_no_prompt_fits_into(tmp_path, tiny_args, reference, case):
    """The host's memory plays the part of a GPU's memory here."""
    kind, prefill_args, decode_args = STAGED[case]
    if is_missing(kind):
        pytest.skip(f"{kind} is not installed here")
    expected, long = reference
    with pd_pair(tmp_path, kind, *tiny_args, *CHUNKED, prefill_args=prefill_args, decode_args=decode_args) as pair:
        found = answered(pair.router)
        assert outputs(found) == expected
        assert all(answer["meta_info"]["timing"]["transfer_bytes"] for answer in found["chunked"])
        pair.assert_all_returned()
        outlive(pair, long)


def outlive(pair, expected: list[int]) -> None:
    """Kill the prefill between the first token, which the client has, and its KV, which can't land."""
    worker = pair.decode.family()["worker"]
    freeze(worker.pid)
    with httpx.stream(
        "POST",
        pair.router.url + "/generate",
        json={**body(SHARED[::-1] + SHARED, 1), "stream": True},
        timeout=limit(30),
    ) as one_token:
        # It ends with its first token: that is all that it was asked for, and its KV is not waited for.
        assert "[DONE]" in one_token.read().decode()
    received: list[dict] = []
    first = threading.Event()

    def read() -> None:
        asked = {**body(FRESH, 400), "stream": True}
        with httpx.stream("POST", pair.router.url + "/generate", json=asked, timeout=limit(60)) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    received.append(json.loads(line[6:]))
                    first.set()

    client = threading.Thread(target=read)
    client.start()
    try:
        assert first.wait(limit(20))
        assert len(received[0]["output_ids"]) == 1
        pair.prefill.process.kill()
        wait_until(lambda: " is gone: " in pair.decode.log(), 10, "the decode knows")
    finally:
        worker.resume()
    client.join(limit(60))
    assert received[-1]["output_ids"] == expected
    page = Page(pair.decode.client.get(pair.decode.url + "/metrics").text)
    assert page.total("pdserve_handovers_recomputed_total") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_every_shape_of_cluster_on_the_real_model(tmp_path, kind):
    """Prefills × decodes, each prompt whole, in chunks and behind a prefix that the decode holds.

    Chunks are large enough for their first layers to leave ahead of the others.
    """
    real = ("--dtype", "float32")
    with launched(tmp_path, "alone", "server", *ONE_THREAD, *real) as server:
        server.wait_healthy()
        expected = outputs(answered(server))
        stays = server.generate(**body(FRESH, 120))["output_ids"]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for prefills, decodes in itertools.product((1, 2), repeat=2):
        shape = ("--prefill", str(prefills), "--decode", str(decodes), "--disaggregation-transfer-backend", kind)
        args = ("up", *shape, "--threads", "1", *real, *LAYERED, "--mem-fraction-static", "0.2")
        with launched(tmp_path, f"{prefills}{decodes}", *args) as router:
            router.wait_healthy()
            wait_until(lambda r=router: all_there(r), 60, "all instances are there")
            for _ in range(2):  # by turns, so that every pair serves
                assert outputs(answered(router)) == expected, (cores, prefills, decodes)
            if decodes > 1:
                assert moved_stream(router) == stays
            found = router.generate(**body(ONE_CHUNK, 2))["meta_info"]["timing"]["timeline"]
            # Before the pass is over: some layers ahead of the others.
            assert found["queue"] < found["first_byte"] < found["prefill"], found


def moved_stream(router) -> list[int]:
    """Return the tokens of a stream that moves from one decode to the other while it is read."""
    asked = {**body(FRESH, 120), "rid": "moves", "stream": True}
    reader = Reader(router.url, "/generate", asked)
    reader.start()
    reader.met(3)
    decodes = [i["url"] for i in router.info()["instances"] if i["role"] == "decode"]
    received = [httpx.get(url + "/health").json() for url in decodes]
    answers = [
        httpx.post(
            url + "/migrate",
            json={"rid": "moves", "bootstrap_host": "127.0.0.1", "bootstrap_port": other["bootstrap_port"]},
            timeout=limit(30),
            auth=as_admin(),
        )
        for url, other in zip(decodes, reversed(received), strict=True)
    ]
    # One of them has it, or both have had it, if the second was asked when it had just come.
    assert 200 in {answer.status_code for answer in answers}, [answer.text for answer in answers]
    return reader.ended()[-1]["output_ids"]


def all_there(router) -> bool:
    return all(instance["state"] == "healthy" for instance in router.info()["instances"])
