"""Paths of other servers that tell what runs here: ``/version``, ``/ping``, ``/props`` and ``/apply-template``."""

from __future__ import annotations

import pytest
from support.fake_engine import CONTEXT_LENGTH, FakeEngine, with_engine

from pdserve.messages.control import Pong
from pdserve.messages.text import EncodeReq

USER = {"role": "user", "content": "hi there"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("is_ready", [True, False])
def test_ping_is_a_health_check_by_either_method(method: str, is_ready: bool) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            engine.pong = Pong(is_ready)
            answer = await client.request(method, "/ping")
            assert answer.status_code == (200 if is_ready else 503)
            assert (await client.delete("/ping")).status_code == 405

    with_engine(run)


def test_version_and_props() -> None:
    async def run(engine: FakeEngine) -> None:
        version = (await engine.get("/version")).json()["version"]
        props = (await engine.get("/props")).json()
        assert props["default_generation_settings"] == {"n_ctx": CONTEXT_LENGTH}
        assert (props["total_slots"], props["model_alias"]) == (engine.options.max_running_requests, "m")
        assert props["build_info"] == f"pdserve {version}"

    with_engine(run, served_model_name="m")


def test_a_template_is_applied() -> None:
    async def run(engine: FakeEngine) -> None:
        body = {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
        assert (await engine.post("/apply-template", body)).json() == {"prompt": "hi there"}
        [question] = [question for question in engine.questions if isinstance(question, EncodeReq)]
        assert question.chat is not None
        assert (question.chat.tools, question.chat.template_args) == ([TOOL], {"a": 1})
        assert not question.chat.add_generation_prompt
        bad = await engine.post("/apply-template", {"messages": [{**USER, "content": "bad"}]})
        assert (bad.status_code, bad.json()["error"]["message"]) == (400, "prompt: not encodable")
        for wrong in ({}, {"messages": []}, {"messages": [USER], "model": "other"}):
            assert (await engine.post("/apply-template", wrong)).status_code in (400, 404)

    with_engine(run, template="tools", served_model_name="m")
