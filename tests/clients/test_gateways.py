"""sglang-router and its successor smg, in front of our prefill and decode servers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clients import MODEL, python_of
from support.machine import limit
from support.processes import Pair, free_ports, wait_until

GATEWAYS = {"sglang-router": ["-m", "sglang_router.launch_router"], "smg": ["-m", "smg", "launch"]}
ASK = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=list(GATEWAYS))
def gateway(
    request: pytest.FixtureRequest, running_pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    [port] = free_ports(1)
    bootstrap = str(running_pair.prefill.info()["options"]["disaggregation_bootstrap_port"])
    log: Path = tmp_path_factory.mktemp("gateway") / "log"
    argv = [
        *(str(python_of("gateways")), *GATEWAYS[request.param], "--host", "127.0.0.1", "--port", str(port)),
        *("--pd-disaggregation", "--prefill", running_pair.prefill.url, bootstrap, "--decode", running_pair.decode.url),
        *("--policy", "round_robin"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=limit(60), trust_env=False) as client:
            wait_until(lambda: answers(client, process, log), 60, "the gateway serves", every=0.5)
            yield client
    finally:
        process.terminate()
        process.wait(limit(30))


def answers(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        return client.post("/generate", json=ASK).status_code == 200
    except httpx.TransportError:
        return False


def test_generate_says_what_our_own_router_says(gateway: httpx.Client, pair: Pair) -> None:
    whole = gateway.post("/generate", json=ASK).json()
    assert whole["text"] == pair.router.generate(**ASK)["text"]
    assert whole["meta_info"]["timing"]["transfer_bytes"] > 0


def test_a_stream(gateway: httpx.Client, pair: Pair) -> None:
    with gateway.stream("POST", "/generate", json={**ASK, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3


def test_openais_api(gateway: httpx.Client, pair: Pair) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    theirs = gateway.post("/v1/chat/completions", json=body)
    assert theirs.status_code == 200, theirs.text
    ours = pair.router.post("/v1/chat/completions", body).json()
    assert theirs.json()["choices"][0]["message"]["content"] == ours["choices"][0]["message"]["content"]
