"""``kill -9`` of every kind of process, under load: quick errors, a loud exit, no orphan, and back in use after a
restart.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Pair, free_ports, freeze, launched, pd_pair, wait_until

from pdserve.disaggregation.handover.membership import LEASE_SECONDS

DECODES = ["worker", "scheduler", "detokenizer", "supervisor"]
OTHERS = ["tokenizer", "http"]
SILENCE_SECONDS = 5.0
"""Silence of a peer that counts as its death here: longer than a busy machine keeps a process waiting."""
ERROR_SECONDS = 50.0
"""Seconds until a client must get the error of a death or a silence.

It takes about a second, and ``SILENCE_SECONDS`` for a frozen peer. The router's limits, which end a hanging request,
are longer than this.
"""


def started(tmp: Path, backend: str, tiny_args: list[str]) -> contextlib.AbstractContextManager[Pair]:
    """Start a pair that follows clients to any host and soon notices a silent peer."""
    silence = ("--disaggregation-heartbeat-timeout", str(SILENCE_SECONDS))
    return pd_pair(tmp, backend, *tiny_args, *silence, decode_args=["--insecure-cluster"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_args) -> Iterator[Callable[[str], Pair]]:
    """Gives the pair of a backend, which is started once."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda backend: stack.enter_context(started(tmp_path_factory.mktemp(backend), backend, tiny_args)))


@pytest.fixture
def pair(request, pairs) -> Pair:
    """Return the pair of the backend that the test names. Each test leaves it running, with nothing in use."""
    return pairs(request.param)


class Load:
    """Clients that keep streams open through the router, and note when each one learns of its end."""

    def __init__(self, pair: Pair, count: int, tokens: int = 1900) -> None:
        self.tokens = tokens
        self.ends: list[tuple[float, str]] = []
        self.streaming = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._stream, args=(pair.router.url,)) for _ in range(count)]
        for thread in self.threads:
            thread.start()
        for _ in range(count):
            assert self.streaming.acquire(timeout=limit(30))

    def _stream(self, url: str) -> None:
        params = {"max_new_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": [1, 2, 3], "sampling_params": params, "stream": True, "incremental": True}
        end = "closed without a word"
        try:
            with httpx.stream("POST", url + "/generate", json=body, timeout=limit(60), trust_env=False) as response:
                for i, line in enumerate(response.iter_lines()):
                    if i == 0:
                        self.streaming.release()
                    if '"error"' in line:
                        end = line
                    elif line == "data: [DONE]" and end == "closed without a word":
                        end = "done"
        except httpx.TransportError as e:
            end = repr(e)
        self.ends.append((time.monotonic(), end))

    def join(self) -> None:
        """Wait for every client."""
        for thread in self.threads:
            thread.join(limit(60))
            assert not thread.is_alive(), "a client hangs"


def answers(pair: Pair) -> bool:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    return pair.router.post("/generate", body).status_code == 200


def kill_under_load(pair: Pair, victim_name: str, child: str) -> None:
    victim = getattr(pair, victim_name)
    assert answers(pair)
    # A prefill's end is no end for streams that decode: they are waited for, and need to outlast the kill alone.
    load = Load(pair, 3, 1900 if victim_name == "decode" else 600)
    family = victim.family()
    assert child in family, sorted(family)
    killed_at = time.monotonic()
    family[child].send_signal(signal.SIGKILL)
    code = victim.process.wait(limit(10))
    assert code != 0
    if child != "supervisor":
        assert f"process {child} was killed by SIGKILL" in victim.log()
    _, alive = psutil.wait_procs(list(family.values()), timeout=limit(5))
    assert not alive, f"orphans: {alive}"
    if victim_name == "decode":
        load.join()
        for at, end in load.ends:
            assert "error" in end, end
            assert at - killed_at < ERROR_SECONDS
    asked_at = time.monotonic()
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    response = pair.router.post("/generate", body)
    assert response.status_code in (502, 503), response.text
    assert time.monotonic() - asked_at < ERROR_SECONDS
    victim.start()
    victim.wait_healthy()
    wait_until(lambda: answers(pair), 10, "the router and its peer use the restarted instance", every=0.1)
    if victim_name == "prefill":
        load.join()  # streams that were decoding when the prefill died were none of its business
        assert {end for _, end in load.ends} == {"done"}
        assert all(at > killed_at for at, _ in load.ends)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("pair", "victim", "children"),
    [
        pytest.param("shm", "prefill", ["bootstrap"], id="prefill"),
        pytest.param("shm", "decode", DECODES[:1], id="decode"),
        # All are watched alike, so some of each are enough here. test_backends.py has a prefill's death by tcp.
        pytest.param("tcp", "prefill", [*DECODES, *OTHERS], id="prefill-others", marks=pytest.mark.slow),
        pytest.param("shm", "decode", [*DECODES[1:], *OTHERS], id="decode-others", marks=pytest.mark.slow),
    ],
    indirect=["pair"],
)
def test_kill_each_process_in_turn(pair, victim, children):
    for child in children:
        kill_under_load(pair, victim, child)
    pair.assert_all_returned()


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_killed_router_leaves_nothing_running_on_the_instances(pair):
    load = Load(pair, 2)
    killed_at = time.monotonic()
    pair.router.process.kill()
    load.join()
    assert all(at - killed_at < ERROR_SECONDS for at, _ in load.ends)
    pair.assert_all_returned()
    pair.router.process.wait()
    pair.router.start()
    pair.router.wait_healthy()


@pytest.mark.parametrize("pair", ["shm", pytest.param("tcp", marks=pytest.mark.slow)], indirect=True)
def test_frozen_prefill_is_an_error_in_seconds_and_the_pair_heals_by_itself(pair):
    assert answers(pair)
    before = len(pair.decode.log())
    scheduler = pair.prefill.family()["scheduler"]
    freeze(scheduler.pid)
    try:
        asked_at = time.monotonic()
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        response = pair.router.post("/generate", body)
        assert response.status_code in (502, 503, 504), response.text
        assert time.monotonic() - asked_at < ERROR_SECONDS
        wait_until(lambda: "silent" in pair.decode.log()[before:], 5, "the decode notices the silence")
    finally:
        scheduler.resume()
    wait_until(lambda: answers(pair), 10, "the pair serves again", every=0.1)
    pair.assert_all_returned()


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_a_frozen_prefill_that_holds_memory_is_named_and_others_take_its_place(tmp_path, tiny_args, pair):
    """A frozen prefill can let go of the decode's pages by shm alone."""
    spare_port = free_ports(1)[0]
    args = ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "shm", *ONE_THREAD, *tiny_args]
    args += ["--disaggregation-bootstrap-port", str(spare_port)]
    with launched(tmp_path, "spare", "server", *args) as spare:
        spare.wait_healthy()
        port = pair.prefill.info()["disaggregation"]["bootstrap_port"]
        prefills = ["--prefill", pair.prefill.url, str(port), spare.url, str(spare_port)]
        with launched(tmp_path, "both", "router", *prefills, "--decode", pair.decode.url) as router:
            router.wait_healthy()
            assert router.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}).is_success
            epoch = pair.prefill.info()["epoch"]
            family = pair.prefill.family()
            named = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5}
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, **named}
            freeze(family["worker"].pid)
            held: list[httpx.Response] = []
            legs = [
                threading.Thread(target=pair.prefill.post, args=("/generate", body)),
                threading.Thread(target=lambda: held.append(pair.decode.post("/generate", body))),
            ]
            for leg in legs:
                leg.start()
            open_transfers = lambda: pair.decode.client.get(pair.decode.url + "/transfers").json()["transfers"]  # noqa: E731
            wait_until(lambda: [t["state"] for t in open_transfers()] == ["transferring"], 10, "the prefill may write")
            for process in family.values():
                freeze(process.pid)
            try:
                frozen_at = time.monotonic()
                legs[1].join(limit(10))
                assert (held[0].status_code, "silent" in held[0].text) == (503, True)
                assert time.monotonic() - frozen_at < ERROR_SECONDS
                for i in range(4):
                    asked_at = time.monotonic()
                    plain = {"input_ids": [9, 8, i], "sampling_params": {"max_new_tokens": 2}}
                    assert router.post("/generate", plain).is_success
                    assert time.monotonic() - asked_at < ERROR_SECONDS
                health = lambda: pair.decode.client.get(pair.decode.url + "/health").json()  # noqa: E731
                wait_until(
                    lambda: epoch in health().get("warning", ""), 20, "/health names who holds memory", every=0.2
                )
                assert health()["status"] == "ready"
            finally:
                for process in family.values():
                    process.resume()
            legs[0].join(limit(30))
            wait_until(lambda: "warning" not in health(), 10, "it has let go", every=0.1)
            wait_until(lambda: answers(pair), 10, "the pair serves again", every=0.1)
            pair.assert_all_returned()


def test_sigterm_drains_until_every_answer_is_out_and_frees_the_port(tmp_path, tiny_args):
    with launched(tmp_path, "unified", "server", *ONE_THREAD, *tiny_args) as server:
        server.wait_healthy()
        batch = {
            "input_ids": [[i, 2, 3] for i in range(1, 9)],  # one batch, all of it ends in the same step
            "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        answer: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answer.append(server.post("/generate", batch)))
        client.start()
        wait_until(lambda: server.info()["queues"]["running"] == 8, 10, "the batch runs")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "requests are left" in server.log(), 5, "the drain begins")
        refused = server.post("/generate", {"input_ids": [1, 2]})
        assert refused.status_code == 503
        assert "draining" in refused.text
        client.join(limit(60))
        assert answer[0].status_code == 200, answer[0].text[:300]
        assert [len(a["output_ids"]) for a in answer[0].json()] == [300] * 8
        assert server.process.wait(limit(10)) == 0
    with socket.create_server(("127.0.0.1", server.port)):
        pass


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_host_that_is_no_host_fails_the_request_and_not_the_decode(pair):
    port = pair.prefill.info()["disaggregation"]["bootstrap_port"]
    for i, host in enumerate(("127。0。0。1", "no such host", "[", "münchen.invalid", "\u0000")):
        body = {"input_ids": [1, 2], "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 77 + i}
        response = pair.decode.client.post(pair.decode.url + "/abort_request", json={"abort_all": True})
        assert response.status_code == 200
        # The first is a spelling of 127.0.0.1: the prefill is reached, and waits for a request that never comes.
        seconds = 2.0 if i == 0 else limit(20)
        with pytest.raises(httpx.TimeoutException) if i == 0 else contextlib.nullcontext():
            response = pair.decode.client.post(pair.decode.url + "/generate", json=body, timeout=seconds)
            assert 400 <= response.status_code < 600
    assert pair.decode.is_healthy()
    wait_until(lambda: answers(pair), 10, "the pair serves on", every=0.1)


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_an_instance_that_cannot_be_found_says_so_until_it_can(pair):
    prefill, before = pair.prefill, len(pair.prefill.log())
    bootstrap = prefill.family()["bootstrap"]
    freeze(bootstrap.pid)
    try:
        wait_until(lambda: not prefill.is_healthy(), 3 * LEASE_SECONDS, "/health says no")
        answer = prefill.client.get(prefill.url + "/health")
        assert answer.status_code == 503
        assert "can't find this instance" in answer.text
        assert "does not answer" in answer.text
    finally:
        bootstrap.resume()
    wait_until(prefill.is_healthy, 10, "/health says yes again")
    assert prefill.log()[before:].count("does not answer") == 1


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_port_in_use_is_reported_before_anything_is_loaded(tmp_path, tiny_args, pair):
    with launched(tmp_path, "second", "server", *ONE_THREAD, *tiny_args, port=pair.decode.port) as second:
        assert second.process.wait(limit(20)) == 1
        assert "choose another address with --port" in second.log()
