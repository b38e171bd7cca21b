"""Which instances decode: what they tell of their pace, and what a router makes of it."""

from __future__ import annotations

import asyncio

import pytest
from support.router_rig import TIME_LIMIT, generate, scenario
from support.sim import SimInstance

from pdserve.messages.worker import MeasuredStep
from pdserve.router.fleet import Fleet, Pair
from pdserve.router.instance import Answering, HealthState, Pace, Told
from pdserve.router.options import RouterOptions
from pdserve.router.request_body import RequestBody
from pdserve.scheduler.pace import MEMORY_SECONDS
from pdserve.scheduler.step_builder import Foresight
from pdserve.scheduler.step_shape import StepShape

BODY = RequestBody.parse(b"{}")


def make_fleet(prefill: Pace | None, decode: Pace | None) -> Fleet:
    fleet = Fleet(RouterOptions(prefill=["http://p"], decode=["http://d"]))
    for instance, pace in zip(fleet.instances, (prefill, decode), strict=True):
        instance.learn(Told(pace=pace))
        fleet.set_state(instance, HealthState.HEALTHY, "test")
    return fleet


@pytest.mark.parametrize(
    ("prefill", "decode", "alone"),
    [
        (Pace(10, 1, 40), Pace(35, 1, 40), True),
        (Pace(10, 1, 40), Pace(29, 1, 40), False),  # well within what is promised
        (Pace(36, 1, 40), Pace(35, 1, 40), False),  # the prefill has as much to do
        (Pace(10, 1, 0), Pace(35, 1, 0), False),  # nothing is promised
        (None, Pace(35, 1, 40), False),
        (Pace(10, 1, 40), None, False),
    ],
)
def test_a_prefill_decodes_where_its_decode_can_t_keep_pace(prefill, decode, alone):
    fleet = make_fleet(prefill, decode)
    target = fleet.pick(BODY)
    assert target is fleet.instances[0] if alone else isinstance(target, Pair)


def test_what_was_sent_since_counts():
    fleet = make_fleet(Pace(10, 2, 40), Pace(28, 2, 40))
    prefill, decode = fleet.instances
    places = []
    for _ in range(16):
        target = fleet.pick(BODY)
        place = target.decode if isinstance(target, Pair) else target
        Answering(place).__enter__()
        places.append(place)
    # Two until the decode is beyond three quarters of 40 ms, then the prefill until both are as slow.
    assert places[:2] == [decode] * 2
    assert set(places[2:13]) == {prefill}
    assert decode in places[13:]
    decode.learn(Told(pace=Pace(28, 2, 40)))  # a newer word has them in it
    assert decode.token_ms == 28


def test_a_request_that_moves_counts_where_it_is():
    a, b = make_fleet(None, None).instances
    with Answering(a) as place:
        assert (a.answers, b.answers) == (1, 0)
        place.move(b)
        assert (a.answers, b.answers) == (0, 1)
    assert (a.answers, b.answers) == (0, 0)


@scenario()
async def test_a_busy_decode_s_prefill_gets_the_whole_request(rig):
    p, d = await rig.instance(), await rig.instance()
    p.told = {"status": "ready", "pace": {"token_ms": 10, "stream_ms": 1, "budget_ms": 40}}
    d.told = {"status": "ready", "pace": {"token_ms": 90, "stream_ms": 1, "budget_ms": 40}}
    client = await rig.route([p], [d])
    assert (await generate(client)).status_code == 200
    assert "bootstrap_room" not in p.requests[0].body
    assert not d.requests
    info = await rig.until_states("healthy", "healthy")
    assert [i["token_ms"] for i in info["instances"]] == [10, 90]
    d.told["pace"]["token_ms"] = 20
    async with asyncio.timeout(TIME_LIMIT):
        while not d.requests:
            await generate(client)
    assert "bootstrap_room" in d.requests[0].body


def instance_of(ms_at: dict[int, float]) -> SimInstance:
    """One whose steps of so many decodes take so long."""
    return SimInstance(measured=[MeasuredStep(n, n * 8, 0, 0.0, ms) for n, ms in ms_at.items()])


def test_more_requests_are_slower():
    sim = instance_of({n: 10.0 + n for n in (1, 2, 4, 8, 16, 24)})
    paces = []
    for count in range(3):
        paces.append(sim.scheduler.pace.pace(sim.now))
        sim.submit(f"r{count}", range(8), max_new_tokens=40)
    first, second, third = (pace.token_ms for pace in paces)
    assert first < second < third
    assert 10 < first < 13
    assert all(0.5 < pace.stream_ms < 1.5 for pace in paces)


def test_prompts_that_are_computed_meanwhile_count_and_are_forgotten():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    meter = sim.scheduler.pace
    quiet = meter.pace(100.0).token_ms
    for i in range(1, 100):  # 50 of each 100 ms
        meter.step_done(Foresight(StepShape(0, 0, 64, 0.0), 50.0, None), 50.0, 100.0 + i / 10)
    share = meter.pace(110.0).token_ms / quiet
    assert 1.2 < share < 2.0
    assert meter.pace(110.0 + 10 * MEMORY_SECONDS).token_ms == pytest.approx(quiet, rel=0.01)


def test_what_decodes_alone_take_is_no_prompt_s_time():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    meter = sim.scheduler.pace
    quiet = meter.pace(100.0).token_ms
    for i in range(100):
        meter.step_done(Foresight(StepShape(4, 32, 0, 0.0), 10.0, None), 10.0, 100.0 + i / 10)
        meter.step_done(Foresight(StepShape(4, 32, 2, 8.0), 10.0, None), 10.0, 100.0 + i / 10)
    assert meter.pace(110.0).token_ms == pytest.approx(quiet, rel=0.02)
