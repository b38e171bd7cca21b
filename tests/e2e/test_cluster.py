"""A cluster secret on a running pair, and what belongs to an instance."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, Pair, launched, pd_pair, wait_until
from support.web_server import WebServer

from pdserve.runtime.cluster_secret import BootstrapSignature, RouterKeys

PROMPT = [50, 900, 77, 4000, *range(100, 160)]
SAMPLING = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}


def asked(server: Launched, **fields):
    return server.post("/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING, **fields})


def legs(prefill: Launched, decode: Launched, **fields):
    """Return both answers of a request that names its hand-over itself."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(asked, server, **fields) for server in (prefill, decode)]]


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
    forged = asked(pair.decode, **named(1, 8998), bootstrap_signature=f"{int(time.time())}.{'0' * 64}")
    assert forged.status_code == 403
    assert asked(pair.decode, bootstrap_signature="x").status_code == 400


def test_what_a_router_signed_is_followed_once(pair, secrets, expected):
    signature = BootstrapSignature(RouterKeys.read(str(secrets / "ours")))
    fields = named(4711, pair.prefill.info()["disaggregation"]["bootstrap_port"])
    signed = signature.sign(*fields.values(), time.time())
    answers = legs(pair.prefill, pair.decode, **fields, bootstrap_signature=signed)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].json()["output_ids"] == expected
    again = asked(pair.decode, **fields, bootstrap_signature=signed)
    assert again.status_code == 403
    assert "used before" in again.json()["error"]["message"]


def test_open_handovers_are_shown_until_they_end(pair, secrets):
    """One leg alone waits for the other."""
    signature = BootstrapSignature(RouterKeys.read(str(secrets / "ours")))
    fields = named(99, pair.prefill.info()["disaggregation"]["bootstrap_port"])
    signed = signature.sign(*fields.values(), time.time())

    def shown(server: Launched) -> dict[str, str]:
        reported = server.client.get(server.url + "/transfers").json()
        return {t["direction"]: t["state"] for t in reported["transfers"] if t["room"] == 99}

    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(asked, pair.decode, rid="alone", **fields, bootstrap_signature=signed)
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
        signature = BootstrapSignature(RouterKeys.read(str(tmp_path / "other")))
        fields = named(5, port)
        answer = asked(other, **fields, bootstrap_signature=signature.sign(*fields.values(), time.time()))
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
