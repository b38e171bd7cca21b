"""What a router goes by of what its instances say of themselves."""

from __future__ import annotations

import pytest
from support.router_rig import generate, scenario

from pdserve.router.health import _read_report
from pdserve.router.instance import HealthReport, Instance, Role

PREFILL = {"status": "ready", "epoch": "one", "role": "prefill", "bootstrap_host": "", "bootstrap_port": 9444}


async def address(rig, report, **ports) -> tuple[str, int]:
    """Return the bootstrap address that the decode is given."""
    p, d = await rig.instance(), await rig.instance()
    p.health_report = report
    client = await rig.route([p], [d], **ports)
    await generate(client)
    body = d.requests[0].body
    return body["bootstrap_host"], body["bootstrap_port"]


@scenario()
async def test_the_port_is_what_the_prefill_says(rig):
    assert await address(rig, PREFILL, ports=()) == ("127.0.0.1", 9444)


@pytest.mark.parametrize(
    ("role", "port", "fits"), [("unified", None, False), ("unified", 9000, True), ("", None, True)]
)
def test_who_exchanges_no_kv_is_no_half_of_a_pair(role, port, fits):
    report = HealthReport(epoch="e" if role else "", role=role, bootstrap_port=port)
    for work in (Role.PREFILL, Role.DECODE):
        problem = Instance("http://a:1", work).learn(report)
        assert (problem is None) == fits
        assert fits or "--handover on" in problem
    assert Instance("http://a:1", Role.UNIFIED).learn(report) is None


def test_a_bootstrap_port_that_the_prefill_does_not_know_is_reported_once(caplog):
    instance = Instance("http://a:1", Role.PREFILL, bootstrap_port=7000)
    for port in (7000, 9000, 9000):
        instance.learn(HealthReport(epoch="e", role="prefill", bootstrap_port=port))
    assert [r.getMessage() for r in caplog.records if "bootstrap port" in r.getMessage()] == [
        "prefill http://a:1 says that its bootstrap port is 9000; its URL came with 7000, which decodes are told"
    ]


@scenario()
async def test_an_instance_that_says_nothing_has_the_usual_port(rig):
    assert await address(rig, {"status": "ready"}, ports=()) == ("127.0.0.1", 8998)


@scenario()
async def test_a_port_that_is_given_goes_before(rig):
    assert await address(rig, PREFILL) == ("127.0.0.1", 9001)


@scenario()
async def test_decodes_are_told_the_host_that_the_prefill_advertises(rig):
    report = {**PREFILL, "bootstrap_host": "10.0.0.5"}
    assert await address(rig, report, ports=()) == ("10.0.0.5", 9444)


@pytest.mark.parametrize(
    ("url", "port", "expected"),
    [
        ("http://10.0.0.9:30000", 9001, ("10.0.0.9", 9001)),
        ("http://10.0.0.9:30000", None, ("10.0.0.5", 9444)),
        ("http://127.0.0.1:30000", 9001, ("10.0.0.5", 9001)),
        ("http://localhost:30000", None, ("10.0.0.5", 9444)),
    ],
)
def test_what_the_options_say_goes_before_but_for_loopback(url, port, expected):
    prefill = Instance(url, Role.PREFILL, port)
    prefill.learn(HealthReport("one", "prefill", "10.0.0.5", 9444))
    assert prefill.bootstrap_address == expected


@scenario()
async def test_an_instance_does_what_it_says_it_is_whatever_it_is_named_by(rig):
    p, d = await rig.instance(), await rig.instance()
    p.health_report, d.health_report = {**PREFILL, "role": "decode"}, {**PREFILL, "role": "prefill", "epoch": "two"}
    client = await rig.route([p], [d])
    roles = [i["role"] for i in (await client.get("/server_info")).json()["instances"]]
    assert roles == ["decode", "prefill"]
    assert (await generate(client)).status_code == 200
    assert [len(p.requests), len(d.requests)] == [1, 1]
    assert p.requests[0].body["bootstrap_port"] == PREFILL["bootstrap_port"]


def test_who_becomes_unified_takes_whole_requests():
    instance = Instance("http://10.0.0.9:30000", Role.PREFILL)
    for role, expected in (
        ("unified", Role.PREFILL),
        ("decode", Role.DECODE),
        ("unified", Role.UNIFIED),
        ("unified", Role.UNIFIED),
        ("prefill", Role.PREFILL),
    ):
        assert instance.learn(HealthReport("one", role, "", 9444)) is None
        assert instance.role is expected


@scenario()
async def test_a_unified_instance_serves_as_either(rig):
    p, d = await rig.instance(), await rig.instance()
    p.health_report, d.health_report = ({**PREFILL, "role": "unified", "epoch": epoch} for epoch in ("one", "two"))
    client = await rig.route([p], [d])
    assert (await generate(client)).status_code == 200


@scenario()
async def test_a_fresh_start_is_seen(rig):
    p, d = await rig.instance(), await rig.instance()
    p.health_report = PREFILL
    client = await rig.route([p], [d], ports=())
    p.health_report = {**PREFILL, "epoch": "two", "bootstrap_port": 9555}

    async def report():
        return (await client.get("/server_info")).json()["instances"][0]

    while (seen := await report())["epoch"] != "two":
        assert seen["epoch"] == "one"
    assert seen["bootstrap_port"] == 9555


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "body",
    [
        '{"epoch": 5}',
        '{"role": []}',
        '{"bootstrap_port": 70000}',
        '{"bootstrap_port": -1}',
        f'{{"bootstrap_port": {2**70}}}',
        f'{{"bootstrap_host": "{"h" * 256}"}}',
        f'{{"x": {nested(100_000)}}}',
        f'{{"x": {nested(30_000)}}}',
        "[]",
        "",
        "\udcff",
    ],
)
def test_what_is_no_answer_of_ours_does_no_harm(body):
    assert _read_report(body.encode(errors="surrogateescape")) == HealthReport()


def test_a_fresh_start_is_not_made_to_rest_for_the_one_before():
    prefill = Instance("http://127.0.0.1:1", Role.PREFILL)
    prefill.learn(HealthReport("one", "prefill"))
    prefill.breaker.ask(30.0)
    prefill.learn(HealthReport("one", "prefill"))
    assert prefill.breaker
    prefill.learn(HealthReport("two", "prefill"))
    assert not prefill.breaker
