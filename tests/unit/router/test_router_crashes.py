"""A request that kills the instances that serve it: how many it takes along, and what becomes of the other requests."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest
from support.router_rig import EVENT, Rig, generate, scenario

from pdserve.router import leg as leg_module
from pdserve.router import quarantine as quarantine_module
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.errors import (
    InstanceAnsweredError,
    InstanceCrashedError,
    InstanceUnreachableError,
    MovedAwayError,
    NoInstanceError,
)
from pdserve.router.quarantine import WINDOW_SECONDS, Quarantine, digest_of
from pdserve.router.retries import RetryBudget
from pdserve.runtime.web.client import response as response_module

REFUSED = "request_crashes_instances"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def crashed() -> InstanceCrashedError:
    return InstanceCrashedError("gone")


def full() -> InstanceAnsweredError:
    return InstanceAnsweredError(429, b"", "", ())


def draining() -> InstanceAnsweredError:
    return InstanceAnsweredError(503, b"", "", ())


@pytest.mark.parametrize(
    ("retries", "after_crash", "errors", "allowed"),
    [
        (2, 1, [draining(), draining(), draining()], 2),
        (2, 1, [crashed(), crashed()], 1),
        (2, 0, [crashed()], 0),
        (5, 3, [crashed()] * 4, 3),
        (1, 3, [crashed()] * 4, 1),
        (2, 1, [full(), full()], 1),
        (2, 1, [full(), draining(), draining()], 2),
        (0, 0, [InstanceUnreachableError("refused")] * 9, 9),
        (2, 1, [InstanceUnreachableError("refused"), crashed(), crashed()], 2),
        (2, 1, [MovedAwayError("x"), MovedAwayError("x"), MovedAwayError("x")], 2),
        (2, 1, [NoInstanceError("none")], 0),
        (2, 1, [InstanceAnsweredError(413, b"", "", ())], 0),
    ],
)
def test_how_often_a_request_is_sent_again(retries, after_crash, errors, allowed):
    budget = RetryBudget(retries, after_crash)
    granted = [budget.take(error) for error in errors]
    assert granted == [True] * allowed + [False] * (len(errors) - allowed)


def test_two_deaths_within_a_minute_quarantine_a_request():
    clock = Clock()
    suspects = Quarantine(clock)
    assert not suspects
    suspects.record(b"a", "http://1", clock())
    assert suspects
    assert suspects.culprits(b"a") == []
    clock.now += WINDOW_SECONDS - 1
    suspects.record(b"a", "http://2", clock())
    assert [death.url for death in suspects.culprits(b"a")] == ["http://1", "http://2"]
    assert suspects.culprits(b"b") == []
    clock.now += 1
    assert suspects.culprits(b"a") == []
    clock.now += WINDOW_SECONDS
    assert suspects.culprits(b"a") == []
    assert not suspects


def test_the_same_instance_may_die_twice_and_requests_beside_each_other_see_one_death():
    clock = Clock()
    suspects = Quarantine(clock)
    begun_at = clock()
    clock.now += 5
    for _ in range(3):
        suspects.record(b"a", "http://1", begun_at)
    assert suspects.culprits(b"a") == []
    clock.now += 5
    suspects.record(b"a", "http://1", clock() - 1)
    assert len(suspects.culprits(b"a")) == 2


def test_a_request_that_is_served_is_no_suspect(monkeypatch):
    monkeypatch.setattr(quarantine_module, "MAX_SUSPECTS", 2)
    suspects = Quarantine()
    suspects.record(b"a", "http://1", 0.0)
    suspects.clear(b"a")
    suspects.clear(b"unknown")
    assert not suspects
    for name in (b"a", b"b", b"c"):
        for url in ("http://1", "http://2"):
            suspects.record(name, url, 0.0)
    assert [bool(suspects.culprits(name)) for name in (b"a", b"b", b"c")] == [False, True, True]


def test_long_bodies_have_the_same_kind_of_digest(monkeypatch):
    short = asyncio.run(digest_of(b"x" * 10))
    monkeypatch.setattr(quarantine_module, "INLINE_BYTES", 5)
    assert asyncio.run(digest_of(b"x" * 10)) == short != asyncio.run(digest_of(b"x" * 11))


async def fleet_of(rig: Rig, count: int) -> list:
    return [await rig.instance() for _ in range(count)]


@scenario()
async def test_a_request_that_kills_takes_two_instances_and_the_next_ones_are_served_by_all(rig):
    four = await fleet_of(rig, 4)
    client = await rig.route(worker=four)
    for instance in four:
        instance.dies_of = "poison"
    first = await generate(client, text="poison")
    assert first.status_code == 502
    assert (first.json()["error"]["code"], first.headers["x-should-retry"]) == (REFUSED, "false")
    assert sorted(len(instance.requests) for instance in four) == [0, 0, 1, 1]
    # Its client, or its client's library, tries again.
    for _ in range(5):
        assert (await generate(client, text="poison")).json()["error"]["code"] == REFUSED
    assert sum(len(instance.requests) for instance in four) == 2
    await rig.until_states(*["healthy"] * 4)
    for instance in four:
        instance.requests.clear()
    for _ in range(40):
        assert (await generate(client)).status_code == 200
    assert [len(instance.requests) for instance in four] == [10] * 4


@scenario(retries_after_crash=0)
async def test_without_retries_after_a_crash_one_instance_dies_at_a_time(rig):
    four = await fleet_of(rig, 4)
    client = await rig.route(worker=four)
    for instance in four:
        instance.dies_of = "poison"
    said = [(await generate(client, text="poison")).json()["error"]["code"] for _ in range(4)]
    assert said == [None, REFUSED, REFUSED, REFUSED]
    assert sum(len(instance.requests) for instance in four) == 2


@scenario()
async def test_a_pair_that_dies_counts_both_its_legs(rig):
    prefills, decodes = await fleet_of(rig, 3), await fleet_of(rig, 3)
    client = await rig.route(prefills, decodes)
    for instance in (*prefills, *decodes):
        instance.dies_of = "poison"
    for _ in range(3):
        assert (await generate(client, text="poison", stream=True)).status_code == 502
    for instances in (prefills, decodes):
        assert sum(len(instance.requests) for instance in instances) <= 2
    await rig.until_states(*["healthy"] * 6)
    assert (await generate(client)).status_code == 200


LAST_WORDS = {"message": "a process died", "type": "server_error", "code": "instance_failed", "status": 503}


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_words_of_an_instance_count_as_its_death(stream):
    """Where a process of an instance dies, the others answer what is under way before they stop."""

    @scenario()
    async def run(rig):
        four = await fleet_of(rig, 4)
        client = await rig.route(worker=four)
        for instance in four:
            instance.script, instance.error = "error", LAST_WORDS
        for _ in range(3):
            refused = await generate(client, stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (502, REFUSED)
        assert sum(len(instance.requests) for instance in four) == 2

    run()


@pytest.mark.parametrize("behind", [b"", EVENT])
def test_the_last_words_in_a_stream_count_as_a_death(behind):
    @scenario(retries_after_crash=0)
    async def run(rig):
        two = await fleet_of(rig, 2)
        client = await rig.route(worker=two)
        for instance in two:
            instance.script, instance.pieces = "pieces", [behind, b"data: %s\n\n" % orjson.dumps({"error": LAST_WORDS})]
            instance.pieces = [piece for piece in instance.pieces if piece]
            instance.go_on.set()
        said = [await generate(client, stream=True) for _ in range(3)]
        assert ["a process died" in answer.text for answer in said] == [True, bool(behind), False]
        assert said[2].json()["error"]["code"] == REFUSED
        assert sum(len(instance.requests) for instance in two) == 2

    run()


@pytest.mark.parametrize("dying", ["prefill", "decode"])
def test_the_peers_word_for_a_crash_does_not_hide_it(dying):
    @scenario()
    async def run(rig):
        prefills, decodes = await fleet_of(rig, 3), await fleet_of(rig, 3)
        client = await rig.route(prefills, decodes)
        die, tell = (prefills, decodes) if dying == "prefill" else (decodes, prefills)
        for killed, teller in zip(die, tell, strict=True):
            killed.script, teller.script = "die_on_request", "peer_gone"
            teller.then = [each.go_on for each in die]
        answer = await generate(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, REFUSED)
        assert sum(len(instance.requests) for instance in die) == 2

    run()


@scenario()
async def test_a_death_in_mid_stream_counts_too(rig):
    two = await fleet_of(rig, 2)
    client = await rig.route(worker=two)
    for instance in two:
        instance.script = "die_mid_stream"
        instance.go_on.set()
    for _ in range(2):
        streamed = await generate(client, stream=True)
        assert streamed.content.startswith(EVENT)
    assert REFUSED in streamed.text
    refused = await generate(client, stream=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, REFUSED)
    await rig.until_states("healthy", "healthy")
    for instance in two:
        instance.script = "ok"
    assert (await generate(client, text="another")).status_code == 200


@scenario()
async def test_the_routers_own_probe_is_never_refused(rig):
    one = await rig.instance("die")
    client = await rig.route(worker=[one])
    for _ in range(2):
        assert (await client.get("/health_generate")).status_code == 502
    one.script = "ok"
    await rig.until_states("healthy")
    assert (await client.get("/health_generate")).status_code == 200


@scenario(retries=0, retries_after_crash=0, health_check_interval=3600.0)
async def test_an_instance_that_refuses_connections_costs_no_retry(rig):
    gone, other = await fleet_of(rig, 2)
    client = await rig.route(worker=[gone, other])
    await gone.kill()
    for _ in range(2):
        assert (await generate(client)).status_code == 200
    assert len(other.requests) == 2


@scenario(retries_after_crash=0)
async def test_the_log_names_the_request_that_is_refused(rig):
    two = await fleet_of(rig, 2)
    client = await rig.route(worker=two)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger(Dispatcher.__module__)
    log.addHandler(handler)
    try:
        for instance in two:
            instance.dies_of = "poison"
        for name in ("first", "second", "third"):
            await client.post("/generate", json={"text": "poison"}, headers={"x-request-id": name})
    finally:
        log.removeHandler(handler)
    messages = [record.getMessage() for record in records if record.levelno == logging.ERROR]
    assert [name in said for name, said in zip(("second", "third"), messages, strict=True)] == [True, True]
    assert all(instance.url in messages[0] for instance in two)


def test_a_request_whose_client_caught_up_after_a_pause_is_suspected(monkeypatch):
    monkeypatch.setattr(leg_module, "LONG_PAUSE_SECONDS", 1e-6)
    monkeypatch.setattr(response_module, "CATCH_UP_SECONDS", 0.0)

    @scenario(health_check_interval=60.0)
    async def run(rig):
        three = [await rig.instance("flood_and_die") for _ in range(3)]
        client = await rig.route(worker=three)
        for _ in range(2):
            async with client.stream("POST", "/generate", json={"text": "poison", "stream": True}) as response:
                [instance] = [i for i in three if i.requests and not i.go_on.is_set()]
                tail = b""
                async for data in response.aiter_raw():
                    tail = (tail + data)[-len(EVENT) :]
                    if tail == EVENT:
                        # The router has time to wait for the instance while it answers this.
                        await client.get("/server_info")
                        instance.go_on.set()
        info = (await client.get("/server_info")).json()["instances"]
        assert sum(i["failures"] for i in info) == 2
        refused = await generate(client, stream=True, text="poison")
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, REFUSED)

    run()
