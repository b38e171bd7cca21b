"""Health checks take out members that failed, and keep those that are busy."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import orjson
from support.machine import limit

from pdserve.router.fleet import Fleet
from pdserve.router.health import HealthMonitor
from pdserve.router.instance import HealthState
from pdserve.router.options import RouterOptions
from pdserve.runtime.web.client.client import HttpClient, Whole
from pdserve.runtime.web.client.errors import CannotConnect
from pdserve.runtime.web.errors import error_body

LIMIT = limit(20.0)
REFUSED = -1
BUSY = -2


def given_up(answers: list[int | None], code: str | None = None) -> list[str]:
    """Return the reasons with which an instance's legs are given up, given the answers to its health checks."""
    reasons: list[str] = []

    class Waiting:
        def give_up(self, since: float, reason: str) -> None:
            assert since <= time.monotonic() - 0.001
            reasons.append(reason)

    states_after(answers, Waiting(), code)
    return reasons


def states_after(answers: list[int | None], leg: Any = None, code: str | None = None) -> list[HealthState]:
    """Return the states of an instance that gives ``answers`` to its health checks.

    An answer is a status, None for no answer in time, ``BUSY`` for none while a client's request goes on, or
    ``REFUSED``.
    """

    async def run() -> list[HealthState]:
        limits = {"health_check_interval": 0.01, "health_check_timeout": 0.05, "hang_timeout": 0.001}
        options = RouterOptions(worker=["http://127.0.0.1:1"], **limits)
        fleet = Fleet(options)
        [instance] = fleet.instances
        instance.legs |= {leg} if leg is not None else set()
        given, seen, done = iter(answers), [], asyncio.Event()

        class Client(HttpClient):
            async def fetch(self, method: str, url: str, path: str, *args: object) -> Whole:
                assert (method, url, path) == ("GET", instance.url, "/health")
                seen.append(instance.state)
                status = next(given, 0)
                if status == 0:
                    done.set()
                if status == REFUSED:
                    raise CannotConnect("refused")
                if status == BUSY:
                    instance.heard_at = time.monotonic()
                    status = None
                if not status:
                    await asyncio.Event().wait()
                return Whole(status, [], orjson.dumps(error_body(status, "why", code=code)) if code else b"")

        checks = asyncio.create_task(HealthMonitor(fleet, Client([], 1.0), options).run())
        async with asyncio.timeout(LIMIT):
            await done.wait()
        checks.cancel()
        return seen[1:]

    return asyncio.run(run())


UP, DOWN = HealthState.HEALTHY, HealthState.UNHEALTHY


def test_two_checks_without_an_answer_take_no_instance_out():
    assert states_after([200, None, None, 200, None, None, 200]) == [UP] * 7


def test_three_in_a_row_do_and_one_answer_brings_it_back():
    assert states_after([200, None, None, None, 200]) == [UP, UP, UP, DOWN, UP]


def test_who_answers_clients_meanwhile_is_only_busy():
    assert states_after([200, None, None, BUSY, None, None, BUSY, BUSY, BUSY, BUSY, 200]) == [UP] * 11


def test_an_answer_that_says_no_counts_at_once_as_does_a_refused_connection():
    assert states_after([200, 503, 200]) == [UP, DOWN, UP]
    assert states_after([200, REFUSED, 200]) == [UP, DOWN, UP]


def test_who_is_down_stays_down_while_it_is_silent():
    assert states_after([503, None, None]) == [DOWN] * 3


def test_requests_of_who_hangs_are_given_up_and_of_who_drains_are_not():
    assert given_up([200, None, None, None, None])  # silent
    assert given_up([503, 503], "hangs")
    assert given_up([200, 503, 503, 200]) == given_up([REFUSED, REFUSED]) == given_up([503, 503], "overloaded") == []
    assert given_up([200, None, None, BUSY, None, 200]) == []


def test_others_are_asked_again_when_one_leaves() -> None:
    """It happens at once, not at the next check. A request that waits for the instance continues with the answer."""

    async def run() -> None:
        options = RouterOptions(prefill=["http://127.0.0.1:1"], decode=["http://127.0.0.1:2"])
        options = dataclasses.replace(options, health_check_interval=LIMIT, health_check_timeout=LIMIT)
        fleet = Fleet(options)
        stays, leaves = fleet.instances
        asked = dict.fromkeys((stays.url, leaves.url), 0)

        class Client(HttpClient):
            async def fetch(self, method: str, url: str, path: str, *args: object) -> Whole:
                asked[url] += 1
                status = 503 if url == leaves.url and asked[url] > 1 else 200
                return Whole(status, [], b"{}")

        task = asyncio.create_task(HealthMonitor(fleet, Client([], 1.0), options).run())
        async with asyncio.timeout(LIMIT):
            while fleet.undecided():
                await fleet.wait_change()
            leaves.check_now.set()
            while leaves.state is HealthState.HEALTHY:
                await fleet.wait_change()
            assert fleet.undecided()
            while fleet.undecided():
                await fleet.wait_change()
        assert asked == {stays.url: 2, leaves.url: 2}
        task.cancel()

    asyncio.run(run())
