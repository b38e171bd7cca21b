"""Who is taken out by the health checks, and who is only busy."""

from __future__ import annotations

import asyncio

import httpx

from pdserve.router.fleet import Fleet
from pdserve.router.health import HealthMonitor
from pdserve.router.instance import HealthState
from pdserve.router.options import RouterOptions

LIMIT = 20.0


def states_after(answers: list[int | None]) -> list[HealthState]:
    """The states of an instance as it is asked and gives ``answers``: a status, or None for no answer in time."""

    async def run() -> list[HealthState]:
        options = RouterOptions(worker=["http://127.0.0.1:1"], health_check_interval=0.01, health_check_timeout=0.05)
        fleet = Fleet(options)
        [instance] = fleet.instances
        given, seen, done = iter(answers), [], asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            seen.append(instance.state)
            status = next(given, 0)
            if status == 0:
                done.set()
            if not status:
                await asyncio.Event().wait()
            return httpx.Response(status)

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            checks = asyncio.create_task(HealthMonitor(fleet, client, options).run())
            async with asyncio.timeout(LIMIT):
                await done.wait()
            checks.cancel()
        return seen[1:]

    return asyncio.run(run())


UP, DOWN = HealthState.HEALTHY, HealthState.UNHEALTHY


def test_one_check_without_an_answer_takes_nobody_out():
    assert states_after([200, None, 200, None, 200]) == [UP] * 5


def test_two_in_a_row_do_and_one_answer_brings_it_back():
    assert states_after([200, None, None, 200]) == [UP, UP, DOWN, UP]


def test_an_answer_that_says_no_counts_at_once():
    assert states_after([200, 503, 200]) == [UP, DOWN, UP]


def test_who_is_down_stays_down_while_it_is_silent():
    assert states_after([503, None, None]) == [DOWN] * 3
