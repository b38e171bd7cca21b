"""Instances that ask for a pause, or fail again and again, are used last; other instances are not affected."""

import time

import orjson
import pytest
from support.router_rig import generate, scenario

from pdserve.messages.error_codes import KEY_LIMIT_EXCEEDED
from pdserve.router.circuit_breaker import FAILURES, LONGEST, CircuitBreaker
from pdserve.router.errors import InstanceAnsweredError, InstanceGoneError, InstanceSilentError, retry_after
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthReport, HealthState, Instance, Role
from pdserve.router.options import RouterOptions
from pdserve.router.recent_failures import HALF_LIFE, RecentFailures
from pdserve.router.retries import blamed, charge
from pdserve.router.targets import Pair
from pdserve.runtime.web.errors import anthropic_error, error_fields, llama_error, message_error, plain_error

TRANSFER = b'{"error": {"message": "the peer is gone", "type": "transfer_error"}}'
FULL = b'{"error": {"message": "full", "type": "overloaded_error"}}'
OVERLOADED = b'{"error": {"message": "many uploads", "type": "overloaded_error", "code": "overloaded"}}'
AFTER_3 = ((b"retry-after", b"3"),)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def fail(rest, clock):
    """Let a request fail that took no time."""
    clock.now += 0.001
    rest.failed(clock())


def test_failures_in_a_row_make_it_rest_longer_each_time():
    clock = Clock()
    rest = CircuitBreaker(clock)
    for _ in range(FAILURES - 1):
        fail(rest, clock)
    assert not rest
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST, LONGEST):
        fail(rest, clock)
        assert rest.seconds_left == seconds
        clock.now += seconds
        assert not rest


def test_failures_beside_each_other_are_one():
    clock = Clock()
    rest = CircuitBreaker(clock)
    begun_at = clock()
    clock.now += 1.0
    for _ in range(10 * FAILURES):
        rest.failed(begun_at)
    assert not rest
    for _ in range(FAILURES - 1):
        fail(rest, clock)
    assert rest.seconds_left == 1.0


def test_one_that_was_away_begins_anew():
    clock = Clock()
    rest = CircuitBreaker(clock)
    for _ in range(FAILURES):
        fail(rest, clock)
    rest.forget()
    assert not rest
    for _ in range(FAILURES - 1):
        fail(rest, clock)
    assert not rest


def test_a_success_in_between_begins_the_count_anew():
    clock = Clock()
    rest = CircuitBreaker(clock)
    for _ in range(3):
        for _ in range(FAILURES - 1):
            fail(rest, clock)
        rest.succeeded()
    assert not rest


def test_what_it_asked_for_holds_whatever_succeeds_meanwhile_and_has_a_limit():
    clock = Clock()
    rest = CircuitBreaker(clock)
    rest.ask(3.0)
    rest.ask(1.0)
    rest.succeeded()
    assert rest.seconds_left == 3.0
    rest.ask(10_000.0)
    assert rest.seconds_left == LONGEST
    clock.now += LONGEST
    assert not rest


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"7", 7.0), (b"0", 0.0), (b"", None), (b"-1", None), (b"soon", None), (b"9" * 30, None)]
)
def test_retry_after(value, seconds):
    assert retry_after([(b"x", b"1"), (b"retry-after", value)]) == seconds


def test_who_is_to_blame():
    pair = Pair(Instance("http://p", Role.PREFILL, 1), Instance("http://d", Role.DECODE))
    gone = InstanceGoneError("gone")
    assert blamed(gone, pair) == set(pair)
    gone.url = "http://p"
    assert blamed(gone, pair) == {pair.prefill}
    # A failure between the two may be the fault of either, whichever reports it.
    between = InstanceAnsweredError(502, TRANSFER, "decode http://d", ())
    between.url = "http://d"
    assert blamed(between, pair) == set(pair)
    assert blamed(gone, pair.prefill) == {pair.prefill}
    # A deadline is the router's own.
    silent = InstanceSilentError("silent")
    silent.url = "http://d"
    assert blamed(silent, pair) == set()


def test_what_counts_against_an_instance():
    instance = Instance("http://w", Role.UNIFIED)

    def charged(error):
        for i in range(FAILURES):
            charge(error, [instance], time.monotonic() + i)
        rests, instance.breaker = bool(instance.breaker), CircuitBreaker()
        return rests

    assert charged(InstanceAnsweredError(500, FULL, "", ()))
    assert not charged(InstanceAnsweredError(400, FULL, "", ()))
    assert not charged(InstanceGoneError("gone"))  # its health checks see that too
    assert not charged(InstanceAnsweredError(429, FULL, "", AFTER_3))  # load is no fault
    assert not charged(InstanceAnsweredError(503, OVERLOADED, "", AFTER_3))
    instance.breaker = CircuitBreaker(Clock())
    charge(InstanceAnsweredError(503, FULL, "", AFTER_3), [instance], 0.0)
    assert instance.breaker.seconds_left == 3.0


KEY_LIMIT = error_fields(429, "1024 of this key wait", code=KEY_LIMIT_EXCEEDED)


@pytest.mark.parametrize("shape", [plain_error, message_error, anthropic_error, llama_error])
def test_a_limit_of_one_api_key_says_nothing_about_the_instance(shape):
    instance = Instance("http://w", Role.UNIFIED)
    for i in range(FAILURES):
        error = InstanceAnsweredError(429, orjson.dumps(shape(KEY_LIMIT)), "", AFTER_3)
        charge(error, [instance], time.monotonic() + i)
    assert not instance.breaker
    assert instance.recent_failures.count == 0


@scenario(policy="round_robin")
async def test_a_key_at_its_limit_is_tried_at_one_other_instance_and_then_told(rig):
    three = [await rig.instance("error") for _ in range(3)]
    for instance in three:
        instance.error = KEY_LIMIT
    client = await rig.route(worker=three)
    response = await generate(client)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"] == KEY_LIMIT
    assert sum(len(instance.requests) for instance in three) == 2
    three[0].script = three[1].script = "ok"
    assert (await generate(client)).status_code == 200


@scenario()
async def test_a_key_at_the_limit_of_the_only_instance_is_told_at_once(rig):
    one = await rig.instance("error")
    one.error = KEY_LIMIT
    client = await rig.route(worker=[one])
    assert (await generate(client)).status_code == 429
    assert len(one.requests) == 1


def test_load_and_failures_count_as_load_for_some_time():
    instance = Instance("http://w", Role.UNIFIED)

    def counted(error):
        instance.forget_failures()
        charge(error, [instance], time.monotonic())
        return instance.recent_failures.count > 0.5

    assert counted(InstanceAnsweredError(429, FULL, "", AFTER_3))
    assert counted(InstanceAnsweredError(503, OVERLOADED, "", AFTER_3))
    assert counted(InstanceAnsweredError(500, FULL, "", ()))
    assert not counted(InstanceGoneError("gone"))  # its health checks see that too
    for status in (400, 401, 404, 413):
        assert not counted(InstanceAnsweredError(status, FULL, "", ()))


def test_recent_failures_fade():
    clock = Clock()
    failures = RecentFailures(clock)
    assert failures.count == 0
    failures.add()
    assert failures.count == 1
    clock.now += HALF_LIFE
    assert failures.count == pytest.approx(0.5)
    failures.add()
    assert failures.count == pytest.approx(1.5)
    clock.now += 4 * HALF_LIFE
    assert failures.count == pytest.approx(1.5 / 16)
    clock.now += HALF_LIFE
    assert failures.count == 0
    failures.add()
    failures.forget()
    assert failures.count == 0


def test_an_instance_that_was_away_or_started_anew_has_no_failures():
    fleet = Fleet(RouterOptions(worker=["http://w"]))
    [instance] = fleet.instances
    for state, is_kept in ((HealthState.UNKNOWN, True), (HealthState.UNHEALTHY, False)):
        fleet.set_state(instance, state, "test")
        instance.recent_failures.add()
        fleet.set_state(instance, HealthState.HEALTHY, "test")
        assert (instance.recent_failures.count > 0) is is_kept
    instance.learn(HealthReport(epoch="a"))
    instance.recent_failures.add()
    instance.breaker.ask(60)
    instance.learn(HealthReport(epoch="b"))
    assert instance.recent_failures.count == 0
    assert not instance.breaker


@scenario()
async def test_a_full_instance_gets_less_while_others_are_idle(rig):
    full, free = await rig.instance("full"), await rig.instance()
    client = await rig.route(worker=[full, free])
    for _ in range(6):
        assert (await generate(client)).status_code == 200
    assert (len(full.requests), len(free.requests)) == (1, 6)
    states = (await client.get("/server_info")).json()["instances"]
    assert [state["resting_seconds"] for state in states] == [0, 0]


def test_only_a_503_about_the_instance_itself_asks_for_time():
    assert InstanceAnsweredError(503, FULL, "", AFTER_3).retry_after == 3.0
    assert InstanceAnsweredError(429, FULL, "", AFTER_3).retry_after is None
    assert InstanceAnsweredError(503, OVERLOADED, "", AFTER_3).retry_after is None
    assert InstanceAnsweredError(503, TRANSFER, "", AFTER_3).retry_after is None
    assert InstanceAnsweredError(502, FULL, "", AFTER_3).retry_after is None


@scenario(policy="round_robin")
async def test_a_full_instance_stays_in_rotation_and_its_requests_are_served_elsewhere(rig):
    full, free = await rig.instance("full"), await rig.instance()
    client = await rig.route(worker=[full, free])
    for _ in range(6):
        assert (await generate(client)).status_code == 200
    assert len(full.requests) > 1
    assert len(free.requests) == 6
    states = (await client.get("/server_info")).json()["instances"]
    assert [state["resting_seconds"] for state in states] == [0, 0]


@scenario()
async def test_an_instance_that_asked_to_be_left_alone_is_left_alone(rig):
    busy, free = await rig.instance("busy"), await rig.instance()
    client = await rig.route(worker=[busy, free])
    for _ in range(6):
        assert (await generate(client)).status_code == 200
    assert (len(busy.requests), len(free.requests)) == (1, 6)
    states = (await client.get("/server_info")).json()["instances"]
    assert [state["resting_seconds"] > 0 for state in states] == [True, False]


@scenario(policy="round_robin")
async def test_one_clients_429s_take_no_instance_out_of_rotation(rig):
    four = [await rig.instance() for _ in range(4)]
    client = await rig.route(worker=four)
    for instance in four:
        instance.script = "full"
    for _ in range(3):
        assert (await generate(client)).status_code == 429
    assert sum(len(instance.requests) for instance in four) == 3 * 2  # each is tried at one other instance
    for instance in four:
        instance.script = "ok"
        instance.requests.clear()
    for _ in range(40):
        assert (await generate(client)).status_code == 200
    assert [len(instance.requests) for instance in four] == [10, 10, 10, 10]


@scenario()
async def test_a_batch_that_is_too_large_is_tried_once(rig):
    four = [await rig.instance("too_large") for _ in range(4)]
    client = await rig.route(worker=four)
    response = await generate(client)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "batch_too_large")
    assert sum(len(instance.requests) for instance in four) == 1


@scenario(policy="round_robin")
async def test_at_most_half_of_a_role_is_out_of_rotation(rig):
    four = [await rig.instance("busy") for _ in range(4)]
    client = await rig.route(worker=four)
    assert (await generate(client)).status_code == 503  # tried at three, which ask to be left alone
    for instance in four:
        instance.script = "ok"
        instance.requests.clear()
    for _ in range(8):
        assert (await generate(client)).status_code == 200
    assert sorted(len(instance.requests) for instance in four) == [0, 0, 4, 4]


@scenario()
async def test_where_all_are_full_the_client_is_told_when_to_come_again(rig):
    first, second = await rig.instance("full"), await rig.instance("full")
    client = await rig.route(worker=[first, second])
    for requests in (1, 2):
        response = await generate(client)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        # Each is asked at most once for each request.
        assert len(first.requests) <= requests >= len(second.requests)


@scenario()
async def test_a_full_decode_says_nothing_against_its_prefill(rig):
    p, full, free = await rig.instance(), await rig.instance("full"), await rig.instance()
    client = await rig.route([p], [full, free])
    for _ in range(3):
        assert (await generate(client)).status_code == 200
    assert len(free.requests) == 3
    assert len(p.requests) == 3 + len(full.requests)


@scenario()
async def test_the_only_one_is_asked_again_when_it_said_and_not_before(rig):
    w = await rig.instance("soon")
    client = await rig.route(worker=[w])
    asked_at = time.monotonic()
    assert (await generate(client)).status_code == 200
    assert time.monotonic() - asked_at > 0.95
    assert len(w.requests) == 2


@scenario()
async def test_no_request_waits_for_longer_than_the_window(rig):
    w = await rig.instance("busy")
    client = await rig.route(worker=[w])
    response = await generate(client)
    assert (response.status_code, response.headers["retry-after"], len(w.requests)) == (503, "7", 1)


@scenario(retries=0, policy="round_robin")
async def test_one_that_fails_all_it_is_sent_comes_last_though_it_is_healthy(rig):
    bad, good = await rig.instance("crash_text"), await rig.instance()
    client = await rig.route(worker=[bad, good])
    statuses = [(await generate(client)).status_code for _ in range(14)]
    assert statuses.count(500) == len(bad.requests) == FAILURES
    await good.kill()
    await rig.until_states("healthy", "unhealthy")
    # No other instance is there: one that may fail again is better than none.
    assert (await generate(client)).status_code == 500


@scenario(first_byte_timeout=0.02)
async def test_a_deadline_of_the_router_is_no_failure_of_an_instance(rig):
    p, d = await rig.instance("hang"), await rig.instance("hang")
    client = await rig.route([p], [d])
    for _ in range(FAILURES + 1):
        assert (await generate(client, stream=True)).status_code == 504
    for instance in (await client.get("/server_info")).json()["instances"]:
        assert (instance["state"], instance["failures"], instance["resting_seconds"]) == ("healthy", 0, 0)
