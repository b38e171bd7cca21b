"""``pdserve check --url``: what it says of servers and routers, by what they tell of themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.router_rig import Rig, scenario
from support.sim import SimInstance
from support.web_server import refusing_port, web_server

from pdserve.scheduler.features.idle_check import InvariantResult
from pdserve.scheduler.features.server_info import server_info
from pdserve.terminal.check import server
from pdserve.terminal.check.finding import Finding, Level
from pdserve.terminal.check.server import judge_answer, look_at_server

URL = "http://a:1"
INSTANCE: dict[str, Any] = {
    "role": "decode",
    "status": "ready",
    "version": "0.1.0",
    "model": "smol",
    "fingerprint": "f",
    "device": "cpu",
    "machine": {"kernel_level": "avx2", "threads": 2},
    "pool": {"total": 100, "free": 60, "cached": 30, "in_use": 10},
    "queues": {"waiting": 1, "running": 2},
    "invariants": "ok",
    "retractions": 0,
    "kv_layout": {"page_size": 16, "order": "blocks"},
    "disaggregation": {
        "received": {"done": 5, "failed": 0},
        "peers": [{"bootstrap": "h:8998", "state": "open", "epoch": "e"}],
    },
}


def instance(**changes: Any) -> dict[str, Any]:
    return {**INSTANCE, **changes}


def routed(role: str, *, state: str = "healthy", **changes: Any) -> dict[str, Any]:
    said = {"info": instance(role=role, **changes)} if state == "healthy" else {"error": "refused"}
    return {"url": f"http://{role}", "role": role, "state": state, "reason": "connection refused", **said}


def router(*instances: dict[str, Any], can_serve: bool = True) -> dict[str, Any]:
    return {"role": "router", "router": {"policy": "random", "can_serve": can_serve}, "instances": list(instances)}


def judge(server_answer: Any) -> list[Finding]:
    return list(judge_answer(URL, json.dumps(server_answer).encode()))


def wrong(found: list[Finding]) -> list[tuple[Level, str]]:
    return [(f.level, f"{f.text} | {f.advice}") for f in found if f.level is not Level.OK]


def test_a_good_instance() -> None:
    found = judge(INSTANCE)
    assert not wrong(found)
    assert found[0].text == (
        "http://a:1 is ready: pdserve 0.1.0, smol on cpu, kernels at level avx2; "
        "2 running, 1 waiting, 90 of 100 KV tokens to be had"
    )
    assert found[1].text == "http://a:1 is linked to 1 peer, 5 hand-overs"
    assert "meet with their first request" in judge(instance(disaggregation={"peers": []}))[1].text
    assert len(judge(instance(disaggregation=None))) == 1
    # Clients leave.
    assert not wrong(judge(instance(disaggregation={"sent": {"done": 95, "failed": 5}})))
    assert wrong(judge(instance(disaggregation={"sent": {"done": 94, "failed": 6}})))


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"invariants": "page 7 has two owners"}, Level.PROBLEM, "page 7 has two owners"),
        ({"machine": {"kernel_level": None}}, Level.WARNING, "computes with PyTorch"),
        ({"retractions": 3}, Level.WARNING, "3 times"),
        ({"disaggregation": {"sent": {"done": 5, "failed": 2}}}, Level.WARNING, "2 of 7 hand-overs failed"),
        (
            {"disaggregation": {"peers": [{"bootstrap": "h:8998", "state": "finding"}]}},
            Level.WARNING,
            "the link to h:8998 is finding",
        ),
    ],
)
def test_what_is_wrong_with_an_instance(changes: dict[str, Any], level: Level, says: str) -> None:
    [(found, text)] = wrong(judge(instance(**changes)))
    assert found is level
    assert says in text


def test_a_good_router() -> None:
    found = judge(router(routed("prefill"), routed("decode")))
    assert not wrong(found)
    assert found[0].text == "http://a:1 can serve, with 1 decode, 1 prefill"


@pytest.mark.parametrize(
    ("server_answer", "level", "says"),
    [
        (router(routed("decode"), routed("prefill", state="unhealthy")), Level.PROBLEM, "connection refused"),
        (router(routed("decode"), routed("prefill", state="unknown")), Level.WARNING, "is unknown"),
        (router(routed("prefill"), routed("decode"), can_serve=False), Level.PROBLEM, "can't serve, with 1 decode"),
        (router(routed("prefill"), routed("decode", fingerprint="g")), Level.PROBLEM, "different weights"),
        (router(routed("prefill"), routed("decode", kv_layout={"page_size": 32})), Level.PROBLEM, "--page-size"),
        (router(routed("prefill"), routed("decode", version="0.2")), Level.WARNING, "versions of pdserve: 0.1.0, 0.2"),
        (router(routed("prefill"), routed("decode", model="b")), Level.WARNING, "different models: b, smol"),
        (
            router({**routed("prefill"), "role": "decode"}, routed("decode")),
            Level.PROBLEM,
            "decode http://prefill says that it is prefill",
        ),
        ({"role": "cache"}, Level.WARNING, "is no pdserve server, or of another version: Invalid enum value"),
        ([1, 2], Level.WARNING, "is no pdserve server"),
    ],
)
def test_what_is_wrong_with_a_router(server_answer: Any, level: Level, says: str) -> None:
    [(found, text)] = wrong(judge(server_answer))
    assert found is level
    assert says in text


def test_a_worker_may_have_any_role() -> None:
    assert not wrong(judge(router({**routed("decode"), "role": "worker"})))


def test_over_http() -> None:
    def health(connection: Any) -> None:
        connection.answer(503, {"error": {"message": "the model is loading"}})

    def info(connection: Any) -> None:
        if connection.headers["authorization"] == "Bearer k":
            connection.answer(200, INSTANCE)
        else:
            connection.answer(401, {"error": {"message": "needs a key"}})

    with web_server({"/health": health, "/server_info": info}) as there:
        found = list(look_at_server(there.url, "k"))
        assert "is not healthy: the model is loading" in wrong(found)[0][1]
        assert found[1].text.startswith(f"{there.url} is ready")
        for key, says in ((None, "needs a key to report its state"), ("x", "refuses the key")):
            assert says in wrong(list(look_at_server(there.url, key)))[1][1]
    with web_server(
        {"/health": lambda c: c.answer(200, {}), "/server_info": lambda c: c.answer(500, b"oops")}
    ) as there:
        assert "does not report its state: status 500" in wrong(list(look_at_server(there.url, None)))[0][1]


def test_no_server_is_there_or_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_port() as port:
        [(level, text)] = wrong(list(look_at_server(f"http://127.0.0.1:{port}", None)))
    assert level is Level.PROBLEM
    assert "no server answers" in text
    monkeypatch.setattr(server, "TIMEOUT_SECONDS", 0.05)
    with web_server({"/health": lambda connection: connection.wait_until_dropped()}) as there:
        [(level, text)] = wrong(list(look_at_server(there.url, None)))
    assert level is Level.PROBLEM
    assert "did not answer /health within 0.05 s" in text


def test_what_a_scheduler_tells_is_understood() -> None:
    server_answer = server_info(SimInstance().scheduler, "epoch", InvariantResult()) | {"version": "0.1.0"}
    found = judge(server_answer)
    assert found[0].text.startswith(f"{URL} is ready: pdserve 0.1.0, ")
    assert f"of {server_answer['pool']['total']} KV tokens" in found[0].text


@scenario()
async def test_what_a_router_tells_is_understood(rig: Rig) -> None:
    client = await rig.route(prefill=[await rig.instance()], decode=[await rig.instance(health=503)])
    found = judge((await client.get("/server_info")).json())
    assert found[0].text == f"{URL} can't serve, with 1 decode, 1 prefill"
    texts = [text for _, text in wrong(found)]
    assert any("is unhealthy: /health says 503" in text for text in texts)
    # The scripted instance is no pdserve.
    assert any("does not report its state as pdserve does" in text for text in texts)
