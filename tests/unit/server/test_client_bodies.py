"""Bodies that client libraries send are answered, and the answer names the fields that were ignored.

``payloads/clients.jsonl`` has a line for each request: the client, the feature that was used, the path, the body, and
the ignored fields. The libraries wrote the bodies, and the texts in them are our own.

Bodies of Continue's editor and of Open WebUI follow their sources: Continue's ``openaiTypeConverters.ts``, and
``routers/openai.py`` of Open WebUI 0.12.4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine, with_engine
from support.scripted_model import TEMPLATE

LINES = (Path(__file__).parents[1] / "payloads" / "clients.jsonl").read_text(encoding="utf-8").splitlines()
SENT: list[dict[str, Any]] = [json.loads(line) for line in LINES]

PROMPTS = {"/v1/embeddings": ("input",), "/api/embed": ("input",), "/v1/rerank": ("documents",)}
"""Fields with a list of prompts, where they are not called ``prompt``."""


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: f"{sent['client']}-{sent['feature']}")
def test_a_body_is_answered_and_ignored_fields_are_named(sent: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        response = await engine.post(sent["path"], sent["body"])
        assert response.status_code == 200, response.text
        assert response.headers.get("x-pdserve-ignored", "") == sent["ignored"]
        assert len(engine.requests) == answers(sent["path"], sent["body"])

    with_engine(run, template=TEMPLATE, served_model_name="m")


def answers(path: str, body: dict[str, Any]) -> int:
    """Return the number of answers that a body asks for."""
    if path == "/v1/messages/count_tokens":
        return 0
    lists = [body[name] for name in PROMPTS.get(path, ("prompt",)) if isinstance(body.get(name), list)]
    return max(map(len, lists), default=1) * (body.get("n") or 1)


def test_many_clients_and_features_are_there() -> None:
    assert len({(sent["client"], sent["feature"]) for sent in SENT}) >= 70
