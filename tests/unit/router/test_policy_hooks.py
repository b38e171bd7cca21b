"""A policy hears of each attempt's begin and end once, whatever becomes of it, and of instances that come and go."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from support.router_rig import EVENT, generate, scenario

from pdserve.router.attempts import Attempt
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthReport, HealthState
from pdserve.router.options import RouterOptions
from pdserve.router.policies.base import Ending
from pdserve.router.policies.options import PolicyOptions
from pdserve.router.policies.round_robin import RoundRobinPolicy
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import legs

ANSWERED, FAILED, CANCELLED = Ending.ANSWERED, Ending.FAILED, Ending.CANCELLED


class Recorder(RoundRobinPolicy):
    """Keeps what it hears, and checks that each attempt is sent, begins at most once, and ends, in that order."""

    def __init__(self):
        super().__init__(PolicyOptions())
        self.running, self.endings, self.members, self.heard = [], [], [], asyncio.Event()
        self.answering, self.begun = [], []
        self.instances = set()

    def sent(self, target, facts):
        self.running.append((target, facts))
        self.instances.update(legs(target))

    def began(self, target, facts):
        assert (target, facts) in self.running
        assert (target, facts) not in self.answering
        self.answering.append((target, facts))

    def ended(self, target, facts, ending):
        self.running.remove((target, facts))
        self.begun.append((target, facts) in self.answering)
        if self.begun[-1]:
            self.answering.remove((target, facts))
        self.endings.append(ending)
        self.heard.set()

    async def until(self, count):
        """Wait until ``count`` attempts have ended, and return their endings. A client may have its answer before."""
        while len(self.endings) < count:
            self.heard.clear()
            await self.heard.wait()
        return self.endings

    def joined(self, instance):
        self.members.append(f"+{instance.role}")

    def left(self, instance):
        self.members.append(f"-{instance.role}")


def counts(instance):
    """Return how much work of all kinds an instance has."""
    return instance.answers, instance.prompt_tokens, instance.handed_over_tokens, instance.handed_over


NOTHING = (0, 0, 0, 0)


def recorded(**options):
    """Run an async test with a ``Rig`` and the ``Recorder`` that is its router's policy. No work may be left over."""

    def wrap(test):
        @scenario(**options)
        async def run(rig):
            recorder = Recorder()
            with patch("pdserve.router.fleet.make_policy", lambda options: recorder):
                await test(rig, recorder)
            assert recorder.running == recorder.answering == []
            while any(counts(instance) != NOTHING for instance in recorder.instances):
                await asyncio.sleep(0)  # a prefill's leg may end after the answer

        run.__name__ = test.__name__
        return run

    return wrap


async def start_stream(client):
    """Begin a streamed request, and return its response."""
    request = client.build_request("POST", "/generate", json={"text": "x", "stream": True})
    return await client.send(request, stream=True)


@recorded()
async def test_answers_of_all_kinds(rig, recorder):
    p, d, w = await rig.instance(), await rig.instance(), await rig.instance(health=503)
    client = await rig.route([p], [d], [w])
    assert (await generate(client)).status_code == 200
    assert (await generate(client, stream=True)).status_code == 200
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
    assert await recorder.until(3) == [ANSWERED] * 3
    assert recorder.begun == [True] * 3
    assert recorder.members == ["+prefill", "+decode"]


async def check_refusals(client, recorder, *instances):
    """Check that requests fail and do not begin when ``instances`` refuse them in every way."""
    count = 0
    for script, status in (("bad_request", 400), ("too_large", 413), ("full", 429), ("draining", 503)):
        for instance in instances:
            instance.script = script
        for stream in (False, True):
            count += 1
            assert (await generate(client, stream=stream)).status_code == status
            assert await recorder.until(count) == [FAILED] * count
    assert recorder.begun == [False] * count


@recorded(retries=0)
async def test_a_refusal_is_a_failure_and_no_begin(rig, recorder):
    w = await rig.instance()
    await check_refusals(await rig.route(worker=[w]), recorder, w)


@recorded(retries=0)
async def test_a_refusal_by_a_pair_is_a_failure_and_no_begin(rig, recorder):
    p, d = await rig.instance(), await rig.instance()
    await check_refusals(await rig.route([p], [d]), recorder, p, d)


@recorded()
async def test_an_answer_of_a_worker_begins(rig, recorder):
    client = await rig.route(worker=[await rig.instance()])
    for number, stream in enumerate([False, True], start=1):
        assert (await generate(client, stream=stream)).status_code == 200
        assert await recorder.until(number) == [ANSWERED] * number
    assert recorder.begun == [True] * 2


@recorded()
async def test_each_retry_is_an_attempt(rig, recorder):
    p1, d1, p2, d2 = await rig.instance(), await rig.instance("die"), await rig.instance(), await rig.instance()
    client = await rig.route([p1, p2], [d1, d2])
    assert (await generate(client)).status_code == 200
    assert await recorder.until(2) == [FAILED, ANSWERED]
    assert recorder.begun == [False, True]


@recorded(retries=1)
async def test_the_last_failure_is_one_too(rig, recorder):
    client = await rig.route(worker=[await rig.instance("draining"), await rig.instance("draining")])
    assert (await generate(client)).status_code == 503
    assert await recorder.until(2) == [FAILED, FAILED]


@recorded()
async def test_a_prefill_that_fails_ends_the_attempt(rig, recorder):
    p1, d1, p2, d2 = await rig.instance("busy"), await rig.instance("hang"), await rig.instance(), await rig.instance()
    client = await rig.route([p1, p2], [d1, d2])
    assert (await generate(client, stream=True)).status_code == 200
    assert await recorder.until(2) == [FAILED, ANSWERED]


@recorded()
async def test_a_client_that_leaves_before_the_answer_cancels(rig, recorder):
    p, d = await rig.instance("hang"), await rig.instance("hang")
    client = await rig.route([p], [d])
    request = asyncio.create_task(generate(client))
    await p.arrived.wait()
    await d.arrived.wait()
    [(target, _)] = recorder.running
    assert (counts(target.prefill), counts(target.decode)) == ((0, 1, 1, 1), (1, 0, 0, 0))
    request.cancel()
    assert await recorder.until(1) == [CANCELLED]
    assert recorder.begun == [False]


@recorded()
async def test_choices_are_load_of_the_instance_that_decodes(rig, recorder):
    w = await rig.instance("hang")
    client = await rig.route(worker=[w])
    request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "n": 5}))
    await w.arrived.wait()
    [(target, _)] = recorder.running
    assert counts(target) == (5, 1, 0, 0)
    request.cancel()
    await recorder.until(1)


@recorded()
async def test_a_client_that_leaves_a_stream_cancels(rig, recorder):
    client = await rig.route([await rig.instance()], [await rig.instance("stream_then_hang")])
    response = await start_stream(client)
    assert await anext(response.aiter_raw()) == EVENT
    assert (recorder.endings, len(recorder.answering)) == ([], 1)
    await response.aclose()
    assert await recorder.until(1) == [CANCELLED]


@recorded()
async def test_a_stream_that_breaks_off_has_failed(rig, recorder):
    w = await rig.instance("die_mid_stream")
    client = await rig.route(worker=[w])
    response = await start_stream(client)
    w.go_on.set()
    assert b'"error"' in await response.aread()
    assert await recorder.until(1) == [FAILED]


@recorded()
async def test_a_stream_with_an_error_event_has_failed(rig, recorder):
    w = await rig.instance("pieces")
    w.pieces = [EVENT, b'data: {"error": {"message": "no", "code": 500}}\n\n']
    w.go_on.set()
    client = await rig.route(worker=[w])
    assert b'"no"' in (await generate(client, stream=True)).content
    assert await recorder.until(1) == [FAILED]
    assert recorder.begun == [True]


@recorded()
async def test_a_stream_that_begins_with_an_error_has_not_begun(rig, recorder):
    w = await rig.instance("pieces")
    w.pieces = [b'data: {"error": {"message": "no", "code": 400}}\n\n']
    w.go_on.set()
    client = await rig.route(worker=[w])
    assert (await generate(client, stream=True)).status_code == 400
    assert await recorder.until(1) == [FAILED]
    assert recorder.begun == [False]


@recorded()
async def test_a_request_that_moves_is_one_attempt(rig, recorder):
    leaving, staying = await rig.instance("move"), await rig.instance()
    leaving.follower = staying
    client = await rig.route(worker=[leaving, staying])
    assert (await generate(client, stream=True)).status_code == 200
    assert await recorder.until(1) == [ANSWERED]
    assert recorder.begun == [True]


@recorded()
async def test_no_attempt_is_made_without_an_instance(rig, recorder):
    client = await rig.route(worker=[await rig.instance(health=503)])
    assert (await generate(client)).status_code == 503
    assert recorder.endings == recorder.members == []


@recorded()
async def test_instances_that_die_and_come_back_are_reported(rig, recorder):
    w1, w2 = await rig.instance(), await rig.instance()
    await rig.route(worker=[w1, w2])
    await w1.kill()
    await rig.until_states("unhealthy", "healthy")
    await w1.start()
    await rig.until_states("healthy", "healthy")
    assert recorder.members == ["+worker", "+worker", "-worker", "+worker"]


def test_a_fault_of_the_router_ends_the_attempt():
    recorder, facts = Recorder(), Facts(RequestBody.parse(b"{}"))
    fleet = Fleet(RouterOptions(worker=["http://w"]))
    with pytest.raises(ZeroDivisionError), Attempt(recorder, fleet.instances[0], facts):
        raise ZeroDivisionError
    assert (recorder.endings, recorder.running) == ([FAILED], [])


def test_a_new_epoch_is_a_new_instance_and_a_single_failure_is_none():
    recorder = Recorder()
    with patch("pdserve.router.fleet.make_policy", lambda options: recorder):
        fleet = Fleet(RouterOptions(worker=["http://w"]))
    [instance] = fleet.instances
    for epoch in ("a", "a", "b"):
        instance.learn(HealthReport(epoch=epoch))
        fleet.set_state(instance, HealthState.HEALTHY, "answers")
        fleet.report_failure(instance, "lost")
    assert recorder.members == ["+worker", "-worker", "+worker"]
    fleet.set_state(instance, HealthState.UNHEALTHY, "gone")
    fleet.set_state(instance, HealthState.UNHEALTHY, "gone")
    assert recorder.members == ["+worker", "-worker", "+worker", "-worker"]


def test_an_answer_begins_once():
    recorder, facts = Recorder(), Facts(RequestBody.parse(b"{}"))
    fleet = Fleet(RouterOptions(worker=["http://w"]))
    with Attempt(recorder, fleet.instances[0], facts) as attempt:
        for _ in range(2):
            attempt.began()
    assert (recorder.begun, recorder.answering) == ([True], [])
