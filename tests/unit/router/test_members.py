"""Members come and go in any order: which of them get requests, and what the policy and the health checks hear."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.jumping_loop import JumpingLoop

from pdserve.router import members as members_module
from pdserve.router.errors import ConflictError, NotFoundError
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.health import HealthMonitor
from pdserve.router.instance import HealthState, Instance, Role
from pdserve.router.members import DRAIN_POLL_SECONDS, Members
from pdserve.router.membership import MemberState, Source
from pdserve.router.options import RouterOptions
from pdserve.router.policies.options import PolicyOptions
from pdserve.router.policies.round_robin import RoundRobinPolicy
from pdserve.router.request_body import RequestBody
from pdserve.router.work import Answering
from pdserve.runtime.web.client.client import HttpClient

FACTS = Facts(RequestBody.parse(b"{}"))
URLS = [f"http://w{i}" for i in range(3)]
DRAIN_SECONDS = 1000.0
"""Far more than all short looks of a test take together."""
T = TypeVar("T")


class Recorder(RoundRobinPolicy):
    """Keeps the instances that it was told of, and has not been told to forget."""

    def __init__(self) -> None:
        super().__init__(PolicyOptions())
        self.known: set[Instance] = set()

    def joined(self, instance: Instance) -> None:
        assert instance not in self.known
        self.known.add(instance)

    def left(self, instance: Instance) -> None:
        self.known.remove(instance)


class Monitor:
    """The instances that are being checked."""

    def __init__(self) -> None:
        self.watched: set[Instance] = set()

    def watch(self, instance: Instance) -> None:
        assert instance not in self.watched
        self.watched.add(instance)

    def unwatch(self, instance: Instance) -> None:
        self.watched.remove(instance)


def make_members() -> tuple[Members, Fleet, Monitor, Recorder]:
    fleet, monitor, recorder = Fleet(RouterOptions()), Monitor(), Recorder()
    fleet.policy = recorder
    members = Members(fleet, cast(HealthMonitor, monitor), HttpClient([], 1.0), DRAIN_SECONDS)
    return members, fleet, monitor, recorder


class MembersMachine(RuleBasedStateMachine):
    """Workers that are added, checked, used, cordoned, drained and removed. A model says what is due of each."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=JumpingLoop)
        self.members, self.fleet, self.monitor, self.policy = self.run_in_loop(self.made())
        self.orders: dict[str, MemberState | None] = {}
        self.once_healthy: set[str] = set()
        self.healthy: set[str] = set()
        self.requests: list[tuple[Instance, ExitStack]] = []

    async def made(self) -> tuple[Members, Fleet, Monitor, Recorder]:
        return make_members()

    def run_in_loop(self, main: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(main)

    def call(self, method: Any, url: str) -> None:
        async def main() -> None:
            method(self.members.find(url)[0])

        self.run_in_loop(main())

    def busy(self, url: str) -> bool:
        return any(instance.url == url and instance in self.fleet.instances for instance, _ in self.requests)

    def forget(self, url: str) -> None:
        del self.orders[url]
        self.healthy.discard(url)
        self.once_healthy.discard(url)

    @rule(url=st.sampled_from(URLS))
    def add(self, url: str) -> None:
        async def main() -> None:
            self.members.add(url, None, None, Source.API)

        if url in self.orders:
            with pytest.raises(ConflictError):
                self.run_in_loop(main())
            return
        self.run_in_loop(main())
        self.orders[url] = None

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), is_up=st.booleans())
    def check(self, data: st.DataObject, is_up: bool) -> None:
        url = data.draw(st.sampled_from(sorted(self.orders)))
        self.fleet.set_state(
            self.members.find(url)[0], HealthState.HEALTHY if is_up else HealthState.UNHEALTHY, "a check"
        )
        if is_up:
            self.healthy.add(url)
            self.once_healthy.add(url)
        else:
            self.healthy.discard(url)

    @rule()
    def begin(self) -> None:
        target = self.fleet.pick(FACTS)
        usable = {url for url, order in self.orders.items() if order is None and url in self.healthy}
        assert (target is not None) == self.fleet.can_serve() == bool(usable)
        if target is None:
            return
        assert isinstance(target, Instance)
        assert target.url in usable
        stack = ExitStack()
        stack.enter_context(Answering(target))
        self.requests.append((target, stack))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.requests) - 1))
        self.requests.pop(number)[1].close()

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def cordon(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(self.orders)))
        self.call(self.members.cordon, url)
        self.orders[url] = MemberState.CORDONED

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def readmit(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(self.orders)))
        self.call(self.members.readmit, url)
        self.orders[url] = None

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(self.orders)))
        was_draining, busy = self.orders[url] is MemberState.DRAINING, self.busy(url)
        self.call(self.members.drain, url)
        self.orders[url] = MemberState.DRAINING
        if not busy and not was_draining:
            self.forget(url)

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(self.orders)))
        self.call(self.members.remove, url)
        self.forget(url)

    @rule(is_long=st.booleans())
    def time_passes(self, is_long: bool) -> None:
        """Idle members have drained after two looks, and the others when their time is over."""
        self.run_in_loop(asyncio.sleep(DRAIN_SECONDS + 1 if is_long else 2 * DRAIN_POLL_SECONDS))
        for url, order in list(self.orders.items()):
            if order is MemberState.DRAINING and (is_long or not self.busy(url)):
                self.forget(url)

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        due = {
            url: order or (MemberState.READY if url in self.once_healthy else MemberState.JOINING)
            for url, order in self.orders.items()
        }
        assert {i.url: i.member_state for i in self.fleet.instances} == due
        assert [i.url for i in self.members.all()] == list(self.orders)

    @invariant()
    def checks_and_policy_know_the_members_alone(self) -> None:
        assert self.monitor.watched == set(self.fleet.instances)
        assert {i.url for i in self.policy.known} == self.healthy

    def teardown(self) -> None:
        self.runner.close()


TestMembers = MembersMachine.TestCase


def in_loop(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main)


def test_what_a_removed_instance_is_found_to_be_changes_nothing() -> None:
    async def main() -> None:
        members, fleet, _, policy = make_members()
        gone = members.add(URLS[0], Role.UNIFIED, None, Source.API)
        members.remove(gone)
        fleet.set_state(gone, HealthState.HEALTHY, "late")
        assert (gone.member_state, gone.state, policy.known) == (MemberState.GONE, HealthState.UNKNOWN, set())
        assert fleet.pick(FACTS) is None
        with pytest.raises(NotFoundError):
            members.find(URLS[0])

    in_loop(main())


def test_a_second_order_to_drain_gives_no_more_time() -> None:
    async def main() -> None:
        members, fleet, _, _ = make_members()
        busy = members.add(URLS[0], None, None, Source.API)
        with Answering(busy):
            members.drain(busy)
            await asyncio.sleep(DRAIN_SECONDS * 0.75)
            members.drain(busy)
            assert fleet.instances == (busy,)
            await asyncio.sleep(DRAIN_SECONDS * 0.5)
            assert fleet.instances == ()

    in_loop(main())


@pytest.mark.parametrize("order", ["readmit", "cordon"])
def test_a_drain_that_was_taken_back_removes_nothing_later(order: str) -> None:
    async def main() -> None:
        members, fleet, _, _ = make_members()
        busy = members.add(URLS[0], None, None, Source.API)
        with Answering(busy):
            members.drain(busy)
            getattr(members, order)(busy)
        await asyncio.sleep(2 * DRAIN_SECONDS)
        assert fleet.instances == (busy,)

    in_loop(main())


def test_their_number_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "MAX_MEMBERS", 2)

    async def main() -> None:
        members, _, _, _ = make_members()
        for url in URLS[:2]:
            members.add(url, None, None, Source.API)
        with pytest.raises(ConflictError, match="2 instances"):
            members.add(URLS[2], None, None, Source.API)

    in_loop(main())
