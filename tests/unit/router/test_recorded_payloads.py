"""What client libraries send, as ``make test-clients`` recorded it, still gets the answer that it got then.

``payloads/`` has a file for each client; ``pytest tests/clients --record`` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine

from pdserve.router.instance import Instance, Role
from pdserve.router.request_body import RequestBody
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server

PREFILL = Instance("http://127.0.0.1:30000", Role.PREFILL, 9000)


PAYLOADS = Path(__file__).parents[1] / "payloads"
CLIENTS = {
    *("a_package-langchain", "a_package-litellm", "a_package-openai", "lm_eval", "the_node_package"),
    *(f"sglang_bench_serving-{api}" for api in ("sglang", "sglang-oai", "sglang-oai-chat", "vllm")),
    *("vllm_bench_serve-openai", "vllm_bench_serve-openai-chat"),
}


def recorded() -> list[Any]:
    return [
        pytest.param(said, id=f"{client}-{number}")
        for client in sorted(CLIENTS)
        for number, said in enumerate(json.loads((PAYLOADS / f"{client}.json").read_text()))
    ]


@pytest.mark.parametrize("said", recorded())
def test_what_a_client_sent_gets_the_answer_that_it_got(said: dict[str, Any]) -> None:
    """Through the router's hands: the decode's leg is what the client is answered from."""
    facts = path_table(Server.ROUTER).find(said["path"])
    assert facts is not None
    raw = b"".join(RequestBody.parse(json.dumps(said["body"]).encode(), facts=facts).for_pair(PREFILL).decode)

    async def run(engine: FakeEngine) -> int:
        async with engine.http() as client:
            response = await client.post(said["path"], content=raw)
        return response.status_code

    assert with_engine(run, disaggregation_mode="decode") == said["status"]


def test_every_recording_is_played() -> None:
    assert {file.stem for file in PAYLOADS.glob("*.json")} == CLIENTS
