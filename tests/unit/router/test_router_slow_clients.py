"""A client that reads slowly what its instance has long ended: the instance counts as done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message
from support.router_rig import DONE, EVENT, TIME_LIMIT, FakeInstance

from pdserve.router.client_answer import ClientAnswer
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthState, Instance
from pdserve.router.options import RouterOptions
from pdserve.router.request_body import RequestBody
from pdserve.router.routed_request import RoutedRequest
from pdserve.runtime.web.client.client import HttpClient


class Reader:
    """A client that takes nothing of an answer's body before ``go_on``."""

    def __init__(self) -> None:
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.waits.set()
            await self.go_on.wait()
            self.body += message["body"]


class Scene:
    """A request with a slow reader, at healthy instances of one fleet."""

    def __init__(self, options: RouterOptions) -> None:
        self.fleet = Fleet(options)
        for instance in self.fleet.instances:
            instance.state = HealthState.HEALTHY
        self.client = HttpClient([], 1.0)
        self.dispatcher = Dispatcher(self.fleet, self.client, options)
        self.reader = Reader()

    def serve(self, *, stream: bool) -> asyncio.Task[None]:
        body = RequestBody.parse(b'{"text": "x", "stream": %s}' % (b"true" if stream else b"false"))
        request = RoutedRequest("/generate", [], Facts(body))
        return asyncio.create_task(self.dispatcher.serve(request, ClientAnswer(self.reader.send)))

    async def until(self, condition: Callable[[Instance], object]) -> None:
        while not all(map(condition, self.fleet.instances)):
            await asyncio.sleep(0)


def play(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIME_LIMIT):
            await test()

    asyncio.run(run())


@pytest.mark.parametrize("by_a_pair", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_arrived_counts_at_no_instance_however_slowly_it_is_read(
    by_a_pair: bool, stream: bool
) -> None:
    async def check() -> None:
        fakes = [await FakeInstance().start() for _ in range(1 + by_a_pair)]
        urls = [fake.url for fake in fakes]
        options = RouterOptions(prefill=urls[:1], decode=urls[1:]) if by_a_pair else RouterOptions(worker=urls)
        scene = Scene(options)
        served = scene.serve(stream=stream)
        await scene.reader.waits.wait()
        await scene.until(lambda instance: instance.is_idle)
        assert not served.done()
        for instance in scene.fleet.instances:
            assert instance.legs == set()
            # So a hang or the end of the instance ends nothing.
            scene.fleet.report_failure(instance, "gone")
            await fakes[scene.fleet.instances.index(instance)].kill()
        scene.reader.go_on.set()
        await served
        assert scene.reader.body == 2 * EVENT + DONE if stream else b'"ab"' in scene.reader.body
        assert [i.answers for i in scene.fleet.instances] == [i.in_flight for i in scene.fleet.instances]
        assert all(instance.is_idle for instance in scene.fleet.instances)
        scene.client.close()

    play(check)


def test_an_answer_that_has_not_ended_counts_although_it_is_not_read() -> None:
    async def check() -> None:
        fake = await FakeInstance("stream_then_hang").start()
        scene = Scene(RouterOptions(worker=[fake.url]))
        served = scene.serve(stream=True)
        await scene.reader.waits.wait()
        [instance] = scene.fleet.instances
        assert (instance.in_flight, instance.answers) == (1, 1)
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)
        assert instance.is_idle
        await fake.requests[0].dropped.wait()
        await fake.kill()

    play(check)


def test_an_answer_that_moves_counts_where_it_goes_on() -> None:
    async def check() -> None:
        old, new = await FakeInstance("move").start(), await FakeInstance("stream_then_hang").start()
        old.follower = new
        scene = Scene(RouterOptions(worker=[old.url], decode=[new.url]))
        scene.reader.go_on.set()
        served = scene.serve(stream=True)
        await new.arrived.wait()
        await scene.until(lambda instance: instance.answers == instance.in_flight == (instance.url == new.url))
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)
        assert all(instance.is_idle for instance in scene.fleet.instances)
        for fake in (old, new):
            await fake.kill()

    play(check)
