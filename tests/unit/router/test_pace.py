"""Instances report the pace of their steps, and a router chooses those that decode by it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.router_rig import TIME_LIMIT, generate, scenario
from support.sim import SimInstance

from pdserve.messages.worker import MeasuredStep
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.health import _read_report
from pdserve.router.instance import HealthReport, HealthState, Instance, ReportedPace, Role
from pdserve.router.load import MOST_WAITING
from pdserve.router.options import RouterOptions
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import Pair
from pdserve.router.work import Answering, Computing
from pdserve.scheduler.estimates.cost_model import StepShape
from pdserve.scheduler.pace import MEMORY_SECONDS
from pdserve.scheduler.step_builder import StepEstimate

FACTS = Facts(RequestBody.parse(b"{}"))


def pace(
    token_ms: float, stream_ms: float, budget_ms: float, decode_ms: float | None = None, room: int = 999
) -> ReportedPace:
    return ReportedPace(token_ms, token_ms if decode_ms is None else decode_ms, stream_ms, budget_ms, room)


def make_fleet(prefill: ReportedPace | None, decode: ReportedPace | None, worker=(), streams: int = 4) -> Fleet:
    fleet = Fleet(RouterOptions(prefill=["http://p"], decode=["http://d"], worker=list(worker)))
    fleet.instances[1].answers = streams
    for instance, report in zip(fleet.instances, (prefill, decode, *[None] * len(worker)), strict=True):
        instance.learn(HealthReport(pace=report))
        fleet.set_state(instance, HealthState.HEALTHY, "test")
    return fleet


@pytest.mark.parametrize(
    ("prefill", "decode", "alone"),
    [
        (pace(10, 1, 40), pace(35, 1, 40), True),
        (pace(23, 1, 40), pace(29, 1, 40), False),  # well within what is promised, and the prefill is not much faster
        (pace(10, 1, 40), pace(29, 1, 40), True),  # well within it; but a waste
        (pace(9, 1, 40), pace(12, 1, 40), True),
        (pace(9.1, 1, 40), pace(12, 1, 40), False),
        (pace(36, 1, 40), pace(35, 1, 40), False),  # the prefill has as much to do
        (pace(30, 1, 0), pace(35, 1, 0), False),  # nothing is promised
        (pace(10, 1, 0), pace(35, 1, 0), True),
        (pace(16, 1, 40), pace(38, 1, 40, decode_ms=20), False),  # prompts take its time, not streams
        (pace(16, 1, 40), pace(38, 1, 40, decode_ms=21), True),
        (pace(16, 1, 40), pace(30, 1, 40, decode_ms=21), False),
        (pace(40, 1, 40, decode_ms=5), pace(38, 1, 40, decode_ms=20), False),  # prompts take the prefill's
        (pace(10, 1, 40, room=99), pace(35, 1, 40, room=100), False),  # an answer may end sooner there
        (None, pace(35, 1, 40), False),
        (pace(10, 1, 40), None, False),
    ],
)
def test_a_prefill_decodes_where_its_decode_can_t_keep_pace(prefill, decode, alone):
    fleet = make_fleet(prefill, decode)
    target = fleet.pick(FACTS)
    assert target is fleet.instances[0] if alone else isinstance(target, Pair)


def test_a_decode_with_few_streams_keeps_them():
    assert isinstance(make_fleet(pace(9, 1, 40), pace(12, 1, 40), streams=3).pick(FACTS), Pair)
    fleet = make_fleet(pace(9, 1, 40), pace(12, 1, 40), streams=4)
    with Answering(fleet.instances[0]):  # which has one, too
        assert isinstance(fleet.pick(FACTS), Pair)
    assert fleet.pick(FACTS) is fleet.instances[0]


def test_what_was_sent_since_counts():
    fleet = make_fleet(pace(24, 2, 40), pace(28, 2, 40))
    prefill, decode = fleet.instances
    places = []
    for _ in range(16):
        target = fleet.pick(FACTS)
        place = target.decode if isinstance(target, Pair) else target
        Answering(place).__enter__()
        places.append(place)
    # Two until the decode is beyond three quarters of 40 ms, then the prefill until both are as slow.
    assert places[:2] == [decode] * 2
    assert set(places[2:6]) == {prefill}
    assert decode in places[6:]
    decode.learn(HealthReport(pace=pace(28, 2, 40)))  # a newer word has them in it
    assert decode.token_ms == 28


def test_a_prefill_with_prompts_to_compute_is_left_to_them():
    fleet = make_fleet(pace(10, 1, 40), pace(35, 1, 40))
    prefill = fleet.instances[0]
    with Computing(prefill, MOST_WAITING, for_decode=True), Computing(prefill, 10**5):
        assert fleet.pick(FACTS) is prefill
        with Computing(prefill, 1, for_decode=True):
            assert isinstance(fleet.pick(FACTS), Pair)
    assert prefill.handed_over_tokens == prefill.prompt_tokens == prefill.handed_over == 0


def test_a_worker_is_compared_with_who_would_serve():
    fleet = make_fleet(pace(10, 1, 40), pace(35, 1, 40), worker=["http://w"])
    prefill, decode, worker = fleet.instances
    decode.in_flight, worker.in_flight = 30, 20
    assert fleet.pick(FACTS) is prefill


def test_what_came_while_it_was_asked_counts():
    instance = Instance("http://d", Role.DECODE, answers=9)
    instance.learn(HealthReport(pace=pace(20, 2, 40)), answers=5)
    assert instance.token_ms == 28
    instance.answers = 0
    assert instance.token_ms == 10
    instance.learn(HealthReport(pace=pace(20, 9, 40)), answers=50)
    assert instance.token_ms == 0  # no less than nothing


@pytest.mark.parametrize("token_ms", ["null", "-1", "1e7", '"1"', "1e400"])
def test_a_pace_that_makes_no_sense_is_none_and_the_rest_is_heard(token_ms):
    numbers = f'"decode_ms": 1, "stream_ms": 1, "budget_ms": 1, "max_tokens": 1, "token_ms": {token_ms}'
    report = _read_report(b'{"epoch": "e", "role": "decode", "bootstrap_port": 9000, "pace": {%s}}' % numbers.encode())
    assert (report.epoch, report.role, report.bootstrap_port, report.pace) == ("e", "decode", 9000, None)
    assert _read_report(b"[]") == HealthReport()


def test_a_request_that_moves_counts_where_it_is():
    a, b = make_fleet(None, None, streams=0).instances
    with Answering(a) as place:
        assert (a.answers, b.answers) == (1, 0)
        place.move(b)
        assert (a.answers, b.answers) == (0, 1)
    assert (a.answers, b.answers) == (0, 0)


@scenario()
async def test_a_busy_decode_s_prefill_gets_the_whole_request(rig):
    p, d = await rig.instance(), await rig.instance()
    p.health_report = {"status": "ready", "pace": msgspec.structs.asdict(pace(10, 1, 40))}
    d.health_report = {"status": "ready", "pace": msgspec.structs.asdict(pace(90, 1, 40))}
    client = await rig.route([p], [d])
    assert (await generate(client)).status_code == 200
    assert "bootstrap_room" not in p.requests[0].body
    assert not d.requests
    # A check that was asked while the request ran estimates the time without it, until the next check.
    async with asyncio.timeout(TIME_LIMIT):
        while [i["token_ms"] for i in (await rig.until_states("healthy", "healthy"))["instances"]] != [10, 90]:
            pass
    d.health_report["pace"] |= {"token_ms": 12, "decode_ms": 12}
    async with asyncio.timeout(TIME_LIMIT):
        while not d.requests:
            await generate(client)
    assert "bootstrap_room" in d.requests[0].body


def instance_of(ms_at: dict[int, float]) -> SimInstance:
    """Make an instance that takes these milliseconds for steps, by number of decodes."""
    return SimInstance(measured=[MeasuredStep(n, n * 8, 0, 0.0, ms) for n, ms in ms_at.items()])


def test_more_requests_are_slower():
    sim = instance_of({n: 10.0 + n for n in (1, 2, 4, 8, 16, 24)})
    paces = []
    for count in range(3):
        paces.append(sim.scheduler.estimator.pace(sim.now))
        sim.submit(f"r{count}", range(8), max_new_tokens=40)
    first, second, third = (report.decode_ms for report in paces)
    assert first < second < third
    assert 10 < first < 13
    assert all(0.5 < report.stream_ms < 1.5 for report in paces)


def test_prompts_that_are_computed_meanwhile_count_and_are_forgotten():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    meter = sim.scheduler.estimator._pace
    quiet = meter.pace(100.0)
    for i in range(1, 100):  # 30 of each 100 ms
        meter.step_done(StepEstimate(StepShape(0, 0, 64, 0.0), 30.0, None), 30.0, 100.0 + i / 10)
    busy = meter.pace(110.0)
    assert 1.15 < busy.token_ms / quiet.token_ms < 1.45
    assert busy.decode_ms == quiet.decode_ms
    assert meter.pace(110.0 + 10 * MEMORY_SECONDS).token_ms == pytest.approx(quiet.token_ms, rel=0.01)


def test_prompts_leave_streams_what_is_promised():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    meter = sim.scheduler.estimator._pace
    for i in range(1, 50):  # all the time
        meter.step_done(StepEstimate(StepShape(0, 0, 512, 0.0), 500.0, None), 500.0, 100.0 + i / 2)
    assert meter.pace(124.5).token_ms == 40.0
    meter.step_done(StepEstimate(StepShape(0, 0, 512, 0.0), 500.0, None), 60_000.0, 200.0)
    assert meter._share_at(200.0) <= 1


def test_prompts_that_wait_count():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    quiet = sim.scheduler.estimator.pace(sim.now)
    for number in range(8):
        sim.submit(f"r{number}", range(100), max_new_tokens=1)
    loaded = sim.scheduler.estimator.pace(sim.now)
    assert loaded.token_ms > loaded.decode_ms > quiet.decode_ms * 0.99


def test_what_decodes_alone_take_is_no_prompt_s_time():
    sim = instance_of(dict.fromkeys((1, 8), 10.0))
    meter = sim.scheduler.estimator._pace
    quiet = meter.pace(100.0).token_ms
    for i in range(100):
        meter.step_done(StepEstimate(StepShape(4, 32, 0, 0.0), 10.0, None), 10.0, 100.0 + i / 10)
        meter.step_done(StepEstimate(StepShape(4, 32, 2, 8.0), 10.0, None), 10.0, 100.0 + i / 10)
    assert meter.pace(110.0).token_ms == pytest.approx(quiet, rel=0.02)
