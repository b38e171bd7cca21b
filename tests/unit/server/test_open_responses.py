"""Open Responses' compliance requests before an engine that sends given texts, and what the checks of them find."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.open_responses import CHECKS, Json, item_faults, response_faults

from pdserve.messages.outputs import FinishType, ReasoningReport, TextBatch

QWEN = 'tools <tool_call>{"name": .., "arguments": ..}</tool_call> <think></think>'
THOUGHT = "<think>\nRed will do.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def answered(body: Json) -> httpx.Response:
    """Answer a request in pieces of some characters, by a call if there are tools."""
    output = THOUGHT + (CALL if "tools" in body else "Red.")

    async def run(engine: FakeEngine) -> httpx.Response:
        asking = asyncio.create_task(engine.post("/v1/responses", {**body, "store": False}))
        while not engine.requests and not asking.done():
            await asyncio.sleep(0)
        for request in engine.requests:
            pieces = [output[i : i + 7] for i in range(0, len(output), 7)]
            for i, text in enumerate(pieces):
                is_last = i + 1 == len(pieces)
                item = engine.text(request, text, [i], FinishType.STOP if is_last else None)
                item.reasoning = ReasoningReport(False, 4) if i in (0, len(pieces) - 1) else None
                engine.client.dispatch([TextBatch([item])])
                await asyncio.sleep(0)
        return await asking

    return with_engine(run, hold=True, template=QWEN)


@pytest.mark.parametrize("name", CHECKS)
def test_a_compliance_request_is_answered(name: str) -> None:
    assert CHECKS[name](answered) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"top_p": None}, "response.top_p is None"),
        ({"store": 1}, "response.store is 1"),
        ({"created_at": True}, "response.created_at is True"),
        ({"object": "answer"}, "response.object is 'answer'"),
        ({"output": [{"type": "picture"}]}, "response.output[0] has the type 'picture'"),
        ({"tools": [{"type": "function"}]}, "response.tools[0].name is missing"),
    ],
)
def test_the_checks_find_what_is_wrong(changes: Json, fault: str) -> None:
    whole = answered({"input": "Name a colour."}).json()
    assert response_faults(whole) == []
    assert response_faults({**whole, **changes})[0] == fault


@pytest.mark.parametrize("name", ["id", "summary"])
def test_the_checks_find_what_an_item_lacks(name: str) -> None:
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert item_faults("item", item) == []
    assert item_faults("item", {**item, "encrypted_content": None}) == ["item.encrypted_content is None"]
    del item[name]
    assert item_faults("item", item) == [f"item.{name} is missing"]
