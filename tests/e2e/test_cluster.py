"""A cluster secret on a running pair, and what belongs to an instance."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, Pair, launched, pd_pair, wait_until
from support.router_signer import RouterSigner
from support.web_server import WebServer

PROMPT = [50, 900, 77, 4000, *range(100, 160)]
CLIENT_LEFT = 499
SAMPLING = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}


def asked(server: Launched, **fields):
    return server.post("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING, **fields})


class SignedRequest:
    """One request to one server, as a router with the secret in ``file`` signs it. It may be sent repeatedly."""

    def __init__(self, file: Path, server: Launched, **fields) -> None:
        signer = RouterSigner(str(file))
        content = {"input_ids": PROMPT, "sampling_params": SAMPLING, **fields}
        self._server = server
        self._body = json.dumps(content).encode()
        epoch = signer.epoch(server.url, server.client)
        self._headers = signer.headers(epoch, "POST", "/generate", self._body, "")

    def send(self, body: bytes = b"") -> httpx.Response:
        """Send it, with its own body or another one."""
        return self._server.client.post(
            self._server.url + "/generate", content=body or self._body, headers=self._headers, timeout=limit(60)
        )


def named(room: int, port: int, host: str = "127.0.0.1") -> dict:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def peers_of(server: Launched) -> list[dict]:
    return server.info()["disaggregation"]["peers"]


@pytest.fixture
def pair(secret_pair):
    return secret_pair


@pytest.fixture(scope="module")
def expected(secret_pair):
    answer = asked(secret_pair.prefill)
    assert answer.status_code == 200
    return answer.json()["output_ids"]


def test_a_pair_with_a_secret_serves_through_its_router(pair, expected):
    answer = asked(pair.router)
    assert answer.json()["output_ids"] == expected
    assert answer.json()["meta_info"]["timing"]["transfer_bytes"] > 0
    reported = pair.decode.info()
    assert [peer["state"] for peer in reported["disaggregation"]["peers"]] == ["open"]
    assert reported["disaggregation"]["bootstrap_port"] != pair.prefill.info()["disaggregation"]["bootstrap_port"]
    assert "cluster_secret_file" in reported["options"]
    assert "oooo" not in str(reported)


def test_a_client_may_not_send_a_decode_anywhere(pair):
    for host in ("127.0.0.1", "10.1.2.3", "localhost"):
        answer = asked(pair.decode, **named(1, 8998, host))
        assert answer.status_code == 403
        assert "--allow-bootstrap" in answer.json()["error"]["message"]


def test_what_a_router_signed_is_followed_once(pair, secrets, expected):
    fields = named(4711, pair.prefill.info()["disaggregation"]["bootstrap_port"])
    legs = [SignedRequest(secrets / "ours", server, **fields) for server in (pair.prefill, pair.decode)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(SignedRequest.send, legs))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].json()["output_ids"] == expected
    again = legs[1].send()
    assert again.status_code == 401
    assert "used before" in again.json()["error"]["message"]


def test_a_signature_is_of_the_bootstrap_address_in_its_body(pair, secrets):
    port = pair.prefill.info()["disaggregation"]["bootstrap_port"]
    request = SignedRequest(secrets / "ours", pair.decode, **named(4712, port))
    body = json.dumps({"input_ids": PROMPT, "sampling_params": SAMPLING, **named(4712, port, "10.1.2.3")}).encode()
    assert request.send(body).status_code == CLIENT_LEFT, "a changed body is never whole"


def test_open_handovers_are_shown_until_they_end(pair, secrets):
    """One leg alone waits for the other."""
    fields = named(99, pair.prefill.info()["disaggregation"]["bootstrap_port"])
    alone = SignedRequest(secrets / "ours", pair.decode, rid="alone", **fields)

    def shown(server: Launched) -> dict[str, str]:
        reported = server.client.get(server.url + "/transfers").json()
        return {t["direction"]: t["state"] for t in reported["transfers"] if t["room"] == 99}

    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(alone.send)
        wait_until(lambda: shown(pair.decode) == {"receiving": "transferring"}, 10, "the decode has asked")
        wait_until(lambda: shown(pair.prefill) == {"sending": "bootstrapping"}, 10, "the prefill has heard it")
        assert shown(pair.router) == {"receiving": "transferring", "sending": "bootstrapping"}
        assert pair.decode.post("/abort_request", {"rid": "alone"}).json()["aborted"] == 1
        assert leg.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: shown(pair.router) == {}, 10, "both have let go")


def test_an_instance_with_another_secret_gets_nowhere(pair, secrets, tmp_path, tiny_args, expected):
    (tmp_path / "other").write_text("x" * 40)
    args = ["--disaggregation-mode", "decode", "--cluster-secret-file", str(tmp_path / "other"), *ONE_THREAD]
    args += tiny_args
    with launched(tmp_path, "other", "server", *args) as other:
        other.wait_healthy()
        port = pair.prefill.info()["disaggregation"]["bootstrap_port"]
        answer = SignedRequest(tmp_path / "other", other, **named(5, port)).send()
        assert answer.status_code == 503
        assert "--cluster-secret-file" in answer.json()["error"]["message"]
        assert "another cluster secret" in pair.prefill.log()
        assert peers_of(other) == []
    assert asked(pair.router).json()["output_ids"] == expected


def test_all_processes_of_an_instance_belong_to_its_supervisor(pair):
    for server in (pair.prefill, pair.decode):
        family = server.family()
        children = {"worker", "tokenizer", "scheduler", "detokenizer", "http", "bootstrap"}
        assert family.keys() >= {*children, "supervisor"}
        assert {family[name].ppid() for name in children} == {family["supervisor"].pid}


def test_no_process_of_a_pair_has_torch_in_memory(pair):
    assert_no_torch(pair)


@pytest.mark.slow
def test_no_process_of_a_pair_of_the_default_model_has_torch_in_memory(tmp_path):
    dumps = "--allow-core-dumps"
    with pd_pair(tmp_path, "tcp", dumps, router_args=[dumps]) as pair:
        assert_no_torch(pair)


def assert_no_torch(pair: Pair) -> None:
    """Assert that the C++ engine does without torch, also for penalties, biases and log-probabilities."""
    sampling = SAMPLING | {"repetition_penalty": 1.2, "logit_bias": {"50": 1.5}, "min_new_tokens": 4}
    answer = asked(pair.router, sampling_params=sampling, return_logprob=True, top_logprobs_num=3)
    assert answer.status_code == 200
    assert len(answer.json()["output_ids"]) == SAMPLING["max_new_tokens"]
    for server, names in ((pair.prefill, {"worker", "scheduler"}), (pair.decode, {"worker"}), (pair.router, set())):
        mapped = {name: Path(f"/proc/{p.pid}/maps").read_text() for name, p in server.family().items()}
        assert mapped.keys() >= names | {"supervisor"}
        assert [name for name, maps in mapped.items() if "libtorch" in maps] == []


def test_a_plain_server_opens_no_port_but_its_own(alone):
    assert alone.info()["disaggregation"] is None
    listening = [c for p in alone.family().values() for c in p.net_connections("tcp") if c.status == "LISTEN"]
    assert {c.laddr.port for c in listening} == {alone.port}
    refused = asked(alone, **named(1, 8998))
    assert refused.status_code == 400
    assert "--handover on" in refused.json()["error"]["message"]


def test_a_stranger_at_a_dead_instances_port_gets_nothing_and_serves_no_client(tmp_path, tiny_args, secrets):
    (tmp_path / "keys").write_text("alice a-key-of-alice\n")
    (tmp_path / "admin").write_text("a-key-of-the-admin\n")
    common = ["--cluster-secret-file", str(secrets / "ours"), "--api-key-file", str(tmp_path / "keys")]
    common += ["--admin-key-file", str(tmp_path / "admin")]
    alice = {"authorization": "Bearer a-key-of-alice"}
    with (
        launched(tmp_path, "instance", "server", *ONE_THREAD, *tiny_args, *common) as instance,
        launched(tmp_path, "router", "router", "--worker", instance.url, *common) as router,
    ):
        router.client.headers.update(alice)
        router.wait_healthy()
        assert asked(router).status_code == 200
        family = instance.family()
        for process in family.values():
            process.kill()
        psutil.wait_procs(family.values(), limit(10))
        fine = {"text": "whatever the stranger likes", "meta_info": {}}
        paths = ("/health", "/livez", "/generate", "/server_info", "/flush_cache")
        stranger = WebServer({path: lambda c: c.answer(200, fine) for path in paths}, instance.port)
        try:
            answers = [asked(router) for _ in range(5)]
            wait_until(lambda: len(stranger.requests) > 5, 30, "the router looks for its instance")
            answers += [asked(router) for _ in range(5)]
            assert "can't prove that it belongs to this cluster" in router.info()["instances"][0]["reason"]
        finally:
            stranger.close()
        assert {answer.status_code for answer in answers} <= {502, 503}
        assert {request.path for request in stranger.requests} == {"/livez"}
        for request in stranger.requests:
            assert request.body is None
            assert not any("a-key-of" in value or value == "alice" for value in request.headers.values())


@pytest.mark.slow
def test_processes_of_up_that_are_killed_start_again(tmp_path, tiny_args):
    """At first one fork server makes them all. A restarted one is a program of its own, with the same secret."""
    with launched(tmp_path, "up", "up", *ONE_THREAD, *tiny_args) as up:
        up.wait_healthy()
        expected = asked(up).json()["output_ids"]
        root = psutil.Process(up.process.pid)
        for name in ("prefill", "decode", "router"):
            [killed] = [child for child in root.children() if child.cmdline()[0].startswith(f"pdserve {name}")]
            killed.kill()
            wait_until(lambda: not killed.is_running(), 20, "it is gone")  # noqa: B023
            wait_until(lambda: answers_like(up, expected), 60, f"a new {name} serves", every=0.2)
        assert up.log().count("it is started again") == 3
        wait_until(lambda: len(root.children(recursive=True)) == 17, 20, "all processes are there, and none is left")


def answers_like(server: Launched, expected: list[int]) -> bool:
    try:
        answer = asked(server)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["output_ids"] == expected
