"""The queue of claims: one order for requests that compute here and for those with KV that comes from peers."""

from __future__ import annotations

import random

import msgspec
import pytest
from support.claims import hold_back_prefill, prompt_of, states, submit
from support.sim import make_generate, reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle
from support.world.campaign import Campaign
from support.world.node import HOST, Node

from pdserve.messages.requests import Bootstrap, GenerateReq
from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.reservations import Revocations


def test_priorities_order_hand_overs_and_local_requests_alike() -> None:
    """On the decode: each fills the pool by itself, and they came from the lowest priority to the highest."""
    pair = SimPair(max_total_tokens=48, enable_priority_scheduling=True, priority_scheduling_preemption_threshold=99)
    submit(pair, "first", prompt_of(0))
    pair.decode.plan()
    for i in range(1, 7):
        submit(pair, f"r{i}", prompt_of(i), room=i if i % 2 else 0, priority=i)
    hold_back_prefill(pair)
    run_until_idle(pair)
    assert list(pair.decode.ends) == ["first", "r6", "r5", "r4", "r3", "r2", "r1"]
    assert_all_returned(pair)


def test_a_hand_over_of_high_priority_preempts_a_running_request_of_low_priority() -> None:
    pair = SimPair(max_total_tokens=64, enable_priority_scheduling=True)
    submit(pair, "low", prompt_of(0), outputs=20)
    for _ in range(4):
        pair.decode.plan()
        pair.decode.work()
    submit(pair, "high", prompt_of(1, 40), room=1, priority=50)
    run_until_idle(pair, random.Random(1))
    assert pair.decode.scheduler.planner.retraction.preemptions == 1
    assert list(pair.decode.ends) == ["high", "low"]
    assert pair.decode.tokens["low"] == reference_output(prompt_of(0), 20)
    assert_all_returned(pair)


def test_fair_shares_order_hand_overs_too() -> None:
    """A tenant with one request is served behind one or two of a tenant with ten, not behind all."""
    pair = SimPair(max_total_tokens=48, fair_scheduling=True)
    for i in range(10):
        submit(pair, f"many-{i}", prompt_of(i), room=i + 1, key_name="many")
    submit(pair, "one", prompt_of(50), room=50, key_name="one")
    hold_back_prefill(pair)
    run_until_idle(pair)
    assert list(pair.decode.ends).index("one") <= 2
    assert_all_returned(pair)


def test_no_small_hand_over_passes_a_large_one_that_waits_for_memory() -> None:
    pair = SimPair(max_total_tokens=64)
    submit(pair, "runs", prompt_of(0), outputs=8)
    pair.decode.plan()
    submit(pair, "large", prompt_of(1, 50), room=1)
    for i in range(2, 6):
        submit(pair, f"small-{i}", prompt_of(i, 8), room=i)
    hold_back_prefill(pair)
    run_until_idle(pair)
    assert list(pair.decode.ends)[:2] == ["runs", "large"]
    assert_all_returned(pair)


def test_a_hand_over_passes_local_requests_that_wait_for_compute_and_leaves_them_memory() -> None:
    pair = SimPair(max_total_tokens=256, max_running_requests=16)
    for i in range(4):
        submit(pair, f"local-{i}", prompt_of(i, 40))
    submit(pair, "incoming", prompt_of(9, 40), room=9)
    submit(pair, "too-much", prompt_of(10, 60), room=10)
    pair.decode.plan()  # computes 16 tokens of the first
    for _ in range(10):
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
    assert states(pair)["incoming"] in ("PREALLOCATED", "TRANSFERRING")
    assert states(pair)["too-much"] == "QUEUED"
    run_until_idle(pair)
    assert_all_returned(pair)


@pytest.mark.parametrize("retracted", [False, True])
def test_a_hand_over_of_high_priority_does_not_wait_for_one_of_low_priority_that_was_retracted(retracted: bool) -> None:
    pair = SimPair(max_total_tokens=64, enable_priority_scheduling=True, schedule_conservativeness=0.01)
    submit(pair, "low", prompt_of(0, 20), outputs=30, priority=-1)
    if retracted:
        submit(pair, "peer", prompt_of(1, 20), outputs=30)
        for _ in range(200):
            pair.decode.plan()
            pair.decode.work()
            if pair.decode.scheduler.planner.retraction.count:
                break
        assert pair.decode.scheduler.planner.retraction.count
    submit(pair, "high", prompt_of(2, 20), room=2, priority=50)
    run_until_idle(pair)
    ends = list(pair.decode.ends)
    assert ends.index("high") < ends.index("low")
    assert_all_returned(pair)


def test_three_that_each_precede_another_do_not_wait_for_each_other() -> None:
    """The order of arrival is low, incoming, high. By priority, high comes before both. Nothing else runs."""
    c = Campaign(1, ("prefill", "decode"), max_total_tokens=192, enable_priority_scheduling=True)
    world, rng = c.world, random.Random(3)
    prefill, decode = [slot.node for slot in c._slots]

    def send(node, rid: str, prompt, outputs: int, priority: int, **fields) -> None:
        world.answers[rid] = reference_output(prompt, outputs)
        c.submitted[node.epoch, rid] = ""
        node.open.add(rid)
        node.arrivals[rid] = world.now
        message = make_generate(rid, prompt, max_new_tokens=outputs)
        fields = {"priority": priority, "arrival": world.now, **fields}
        node.scheduler.arrivals.admit(msgspec.structs.replace(message, **fields), world.now)
        node.turn()

    def handover(rid: str, length: int, priority: int) -> None:
        prompt, room = [rng.randrange(97) for _ in range(length)], rng.getrandbits(62)
        for node, leg in ((prefill, "prefill"), (decode, "decode")):
            send(node, rid, prompt, 2, priority, bootstrap=Bootstrap(HOST, 9000, room, leg=leg))

    def local(rid: str, length: int, outputs: int, priority: int) -> None:
        send(decode, rid, [rng.randrange(97) for _ in range(length)], outputs, priority)

    c.chance.run(world.now + 1)
    handover("warm", 8, 0)
    c.chance.run(world.now + 2)
    local("busy", 120, 20, 100)
    c.chance.run(world.now + 0.02)
    local("low", 100, 2, 0)
    c.chance.run(world.now + 0.001)
    handover("incoming", 100, 0)
    c.chance.run(world.now + 0.01)
    local("high", 100, 2, 50)
    c.chance.run(world.now + 5)
    assert {rid for epoch, rid in world.ends if epoch == decode.epoch} == {"warm", "busy", "low", "incoming", "high"}
    assert decode.scheduler.memory.pool.obtainable == 192


class Swaps(Campaign):
    """Two instances that swap their roles under bursts of prompts of a quarter of the pool."""

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(97) for _ in range(self.rng.choice([30, 40, 45, 50]))]

    def _submit(self) -> None:
        super()._submit()
        if self.rng.random() < 0.06:
            for slot in self._slots:
                slot.mode = "decode" if slot.mode == "prefill" else "prefill"
                slot.node.scheduler.instance_role.mode = slot.mode
                slot.node.manager.membership.register()


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 5, 6))])
def test_instances_that_swap_their_roles_under_load_do_not_wait_for_each_other(seed: int) -> None:
    """Half of such campaigns stood still until the time limit when each order had a queue of its own."""
    Swaps(seed, ("prefill", "decode"), outputs=(2, 4, 8)).run(60, rate=200.0)


class BothWays(Campaign):
    """Two instances that compute for each other. ``exchange``: each asks the other for a prompt, and the prompts' own
    legs come when ``release`` says.
    """

    def __init__(self, seed: int, **rules) -> None:
        super().__init__(seed, ("unified", "unified"), **rules)
        self.draw = random.Random(seed)
        self._late: list[tuple[Node, GenerateReq]] = []
        self.chance.run(self.world.now + 1)
        self.exchange("warm", 8, 1)  # they connect
        self.release()
        self.chance.run(self.world.now + 2)

    def exchange(self, name: str, length: int, outputs: int) -> None:
        nodes = self._nodes()
        for decode, prefill in (nodes, nodes[::-1]):
            rid, prompt = f"{name}-{decode.epoch}", [self.draw.randrange(97) for _ in range(length)]
            self.world.answers[rid] = reference_output(prompt, outputs)
            where = Bootstrap(HOST, prefill.network.bootstrap_port, self.draw.getrandbits(62), leg="decode")
            message = make_generate(rid, prompt, max_new_tokens=outputs)
            self._late.append((prefill, self._leg_of(message, msgspec.structs.replace(where, leg="prefill"))))
            self._admit(decode, self._leg_of(message, where))
        self.chance.run(self.world.now + 0.02)

    def release(self) -> None:
        for node, message in self._late:
            self._admit(node, msgspec.structs.replace(message, arrival=self.world.now))
        self._late = []

    def _leg_of(self, message: GenerateReq, where: Bootstrap) -> GenerateReq:
        return msgspec.structs.replace(message, bootstrap=where, arrival=self.world.now)

    def _admit(self, node: Node, message: GenerateReq) -> None:
        self.submitted[node.epoch, message.rid] = ""
        node.admit(message)

    def seconds(self) -> float:
        """Run until all requests are over, and return the seconds."""
        since = self.world.now
        while any(node.open for node in self._nodes()) and self.world.now < since + 60:
            self.chance.run(self.world.now + 0.1)
        self._settle()
        return self.world.now - since


@pytest.mark.parametrize("seed", range(1, 4))
def test_two_that_ask_each_other_for_memory_at_once_do_not_go_on_for_ever(seed: int) -> None:
    """Each has reserved most of its pool for a prompt that waits behind the other's reservation."""
    c = BothWays(seed, max_total_tokens=192)
    c.exchange("large", 120, 4)
    c.release()
    assert c.seconds() < 10
    assert sum(node.manager.receivers.withdrawn for node in c._nodes()) >= 1


def test_of_two_that_ask_each_other_in_the_same_moment_one_gives_back(monkeypatch) -> None:
    monkeypatch.setattr(Revocations, "patience", lambda revocations, rid: 1.0)
    c = BothWays(1, max_total_tokens=192)
    c.exchange("large", 120, 4)
    c.release()
    assert c.seconds() < 3 * STALL_SECONDS
    assert sum(node.manager.receivers.withdrawn for node in c._nodes()) == 1


def test_two_whose_next_hand_over_lacks_memory_for_outputs_do_not_wait_for_each_other() -> None:
    c = BothWays(1, max_total_tokens=144)
    c.exchange("first", 40, 100)
    c.exchange("second", 40, 100)
    c.release()
    assert c.seconds() < 10
