"""The queue of claims: one order for requests that compute here and for those whose KV comes from peers, the limit of
what is reserved, and reservations that are asked back.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from support.sim import SimInstance, make_generate, make_options, reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle
from support.world.campaign import Campaign
from support.world.node import HOST

from pdserve.messages.handover import Abort, Withdraw, Withdrawn
from pdserve.messages.requests import AbortReq, Bootstrap
from pdserve.scheduler.claims import STALL_SECONDS
from pdserve.scheduler.req import Req, ReqState, Route


def submit(pair: SimPair, rid: str, prompt, room: int = 0, *, legs=("prefill", "decode"), outputs: int = 4, **fields):
    """A hand-over, or with ``room`` 0 a request that the decode computes itself. Each comes later than the last."""
    pair.now += 0.001
    for leg in legs if room else ("decode",):
        side = getattr(pair, leg)
        message = make_generate(rid, prompt, max_new_tokens=outputs, **({"room": room} if room else {}))
        message = msgspec.structs.replace(message, arrival=pair.now, **fields)
        side.scheduler.admit_message(message, pair.now)


def hold_back_prefill(pair: SimPair) -> None:
    """Everything happens but that the prefill plans: it has begun nothing."""
    for _ in range(30):
        pair.advance()
        pair.decode.plan()
        while pair.decode.work():
            pass
        for side in (pair.decode, pair.prefill):
            while side.to_transfer.messages:
                side.transfer()
        while pair.to_prefill:
            pair.deliver_to_prefill()
        while pair.to_decode:
            pair.deliver_to_decode()


def states(pair: SimPair) -> dict[str, str]:
    return {r.req.rid: r.state.name for r in pair.decode.receivers.rooms.values()}


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [(number * 31 + i * 7) % 97 for i in range(length)]


# --- one order ---


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
    assert pair.decode.scheduler.planner.preemptions == 1
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
            if pair.decode.scheduler.planner.retractions:
                break
        assert pair.decode.scheduler.planner.retractions
    submit(pair, "high", prompt_of(2, 20), room=2, priority=50)
    run_until_idle(pair)
    ends = list(pair.decode.ends)
    assert ends.index("high") < ends.index("low")
    assert_all_returned(pair)


def test_three_that_each_precede_another_do_not_wait_for_each_other() -> None:
    """By arrival low, incoming, high; by priority high before both; nobody else runs."""
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
        node.scheduler.admit_message(msgspec.structs.replace(message, **fields), world.now)
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
    assert decode.scheduler.memory.obtainable == 192


class Swaps(Campaign):
    """Two instances that swap their roles under bursts of prompts of a quarter of the pool."""

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(97) for _ in range(self.rng.choice([30, 40, 45, 50]))]

    def _submit(self) -> None:
        super()._submit()
        if self.rng.random() < 0.06:
            for slot in self._slots:
                slot.mode = "decode" if slot.mode == "prefill" else "prefill"
                slot.node.scheduler.planner.budget.role = slot.mode
                slot.node.manager.role_changed()


@pytest.mark.parametrize("seed", range(1, 7))
def test_instances_that_swap_their_roles_under_load_do_not_wait_for_each_other(seed: int) -> None:
    """Half of such campaigns stood still until the time limit when each order had a queue of its own."""
    Swaps(seed, ("prefill", "decode"), outputs=(2, 4, 8)).run(60, rate=200.0)


# --- reservations ---


def reserved(pair: SimPair, count: int = 2, **changes) -> SimPair:
    """``count`` hand-overs have filled the decode's pool, and the prefill has begun none."""
    for i in range(1, count + 1):
        submit(pair, f"r{i}", prompt_of(i), room=i, **changes)
    hold_back_prefill(pair)
    assert set(states(pair).values()) == {"TRANSFERRING"}
    return pair


def test_a_stalled_reservation_of_low_priority_is_asked_back_for_one_of_high_priority() -> None:
    pair = reserved(SimPair(max_total_tokens=80, enable_priority_scheduling=True))
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    hold_back_prefill(pair)
    assert states(pair) == {"r1": "TRANSFERRING", "r2": "TRANSFERRING", "high": "QUEUED"}
    pair.now += STALL_SECONDS
    hold_back_prefill(pair)
    assert states(pair) == {"r1": "TRANSFERRING", "r2": "QUEUED", "high": "TRANSFERRING"}
    assert pair.decode.receivers.withdrawn == 1
    pair.decode.scheduler.check_invariants()
    run_until_idle(pair, random.Random(2))
    for number, rid in ((1, "r1"), (2, "r2"), (9, "high")):
        assert pair.decode.tokens[rid] == reference_output(prompt_of(number), 4)
        assert pair.prefill.tokens[rid] == reference_output(prompt_of(number), 1)
    assert_all_returned(pair)


def test_a_reservation_is_not_asked_back_for_its_equal() -> None:
    pair = reserved(SimPair(max_total_tokens=80))
    submit(pair, "later", prompt_of(9), room=9)
    pair.now += 3 * STALL_SECONDS
    hold_back_prefill(pair)
    assert pair.decode.receivers.withdrawn == 0
    run_until_idle(pair)
    assert_all_returned(pair)


def asked_back(begin: bool = False) -> SimPair:
    """``r2`` is asked back, and the question is on its way; with ``begin`` the prefill begins before it comes."""
    pair = reserved(SimPair(max_total_tokens=80, enable_priority_scheduling=True))
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    pair.now += STALL_SECONDS
    for _ in range(3):
        pair.advance()
    if begin:
        for _ in range(6):
            pair.prefill.plan()
            pair.prefill.work()
            pair.collect()
    assert any(isinstance(message, Withdraw) for message in pair.to_prefill)
    return pair


def test_a_prompt_that_is_begun_is_not_given_back() -> None:
    pair = asked_back(begin=True)
    while pair.to_prefill:
        pair.deliver_to_prefill()
    answers = [message for message in pair.to_decode if isinstance(message, Withdrawn)]
    assert [answer.begun for answer in answers] == [True]
    run_until_idle(pair)
    assert pair.decode.receivers.withdrawn == 0
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


@pytest.mark.parametrize("when", ["question", "answer"])
@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_client_that_leaves_while_memory_is_asked_back_leaves_nothing(side: str, when: str) -> None:
    pair = asked_back()
    if when == "answer":
        while pair.to_prefill:
            pair.deliver_to_prefill()
    getattr(pair, side).scheduler.abort(AbortReq("r2", "gone"))
    pair.collect()
    run_until_idle(pair, random.Random(4))
    assert "r2" not in pair.decode.scheduler.reqs
    assert "r2" not in pair.prefill.scheduler.reqs
    assert not pair.prefill.senders.rooms
    assert pair.decode.tokens["high"] == reference_output(prompt_of(9), 4)
    assert_all_returned(pair)


def test_memory_is_asked_back_also_where_the_clients_leg_has_not_come() -> None:
    pair = SimPair(max_total_tokens=80, enable_priority_scheduling=True)
    submit(pair, "r1", prompt_of(1), room=1)
    submit(pair, "r2", prompt_of(2), room=2, legs=("decode",))
    hold_back_prefill(pair)
    submit(pair, "high", prompt_of(9), room=9, priority=50)
    pair.now += STALL_SECONDS
    hold_back_prefill(pair)
    assert states(pair)["r2"] == "QUEUED"
    assert len(pair.prefill.senders._unclaimed) == 1
    submit(pair, "r2", prompt_of(2), room=2, legs=("prefill",))
    run_until_idle(pair)
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


def test_what_an_earlier_attempt_was_told_does_nothing_to_the_next() -> None:
    """Its question and the sender's answer name it, and come again."""
    pair = asked_back()
    question = next(message for message in pair.to_prefill if isinstance(message, Withdraw))
    while pair.to_prefill:
        pair.deliver_to_prefill()
    answer = next(message for message in pair.to_decode if isinstance(message, Withdrawn))
    hold_back_prefill(pair)
    run_until_idle(pair, random.Random(5))
    pair.to_prefill += [question, Abort("prefill", question.handover, "late")]
    pair.to_decode.append(answer)
    run_until_idle(pair)
    assert pair.decode.tokens["r2"] == reference_output(prompt_of(2), 4)
    assert_all_returned(pair)


# --- the limit ---


def both_ways(**changes) -> SimInstance:
    """An instance that takes hand-overs in both directions."""
    return SimInstance(make_options(handover="on", **changes))


def test_reservations_leave_room_for_the_largest_prompt_that_is_computed_for_a_peer() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    outgoing = make_req(sim, "outgoing", 60, leg="prefill")
    claims.came(outgoing)
    incoming = [make_req(sim, f"in-{i}", 30, leg="decode") for i in range(3)]
    for req in incoming:
        claims.add_incoming(req, 0, optional=False)
    # 32 each: beside 60 of the pool's 128 there is room for two.
    assert claims.grant_incoming(0.0) == incoming[:2]
    assert claims.grant_incoming(0.0) == []
    assert claims.first(0.0) is None
    claims.began(incoming[0].rid)
    assert claims.grant_incoming(0.0) == incoming[2:]
    for req in incoming:
        claims.forget(req.rid)
        sim.scheduler.memory.finish(req)
    claims.ended(outgoing.rid)
    assert sim.scheduler.memory.obtainable == 128


def test_a_reservation_that_is_alone_may_be_as_large_as_the_pool() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    claims.came(make_req(sim, "outgoing", 100, leg="prefill"))
    large = make_req(sim, "large", 120, leg="decode")
    claims.add_incoming(large, 0, optional=False)
    assert claims.grant_incoming(0.0) == [large]


def make_req(sim: SimInstance, rid: str, length: int, leg: str) -> Req:
    """A request that was taken in."""
    route = Route.OUTGOING if leg == "prefill" else Route.INCOMING
    return Req.create(make_generate(rid, prompt_of(hash(rid) % 50, length)), route, ReqState.BOOTSTRAPPING, 4, 1)


def test_optional_claims_hold_nobody_up() -> None:
    sim = both_ways(max_total_tokens=64)
    claims = sim.scheduler.planner.claims
    held = make_req(sim, "held", 20, leg="decode")
    optional = make_req(sim, "optional", 60, leg="decode")
    behind = make_req(sim, "behind", 20, leg="decode")
    for req, is_optional in ((held, False), (optional, True), (behind, False)):
        claims.add_incoming(req, 0, optional=is_optional)
    assert claims.grant_incoming(0.0) == [held, behind]
    assert claims.first(0.0) is None


@pytest.mark.parametrize("before", [0, 80], ids=["first", "behind a long local one"])
def test_a_cycle_that_the_limit_could_not_see_is_broken_and_the_revoked_yield(before: int) -> None:
    """Reservations filled the pool before the first prompt for a peer came, which some peer's reservation waits for.
    It may have to wait behind a local prompt of ``before`` tokens.
    """
    sim = both_ways(max_total_tokens=128, schedule_conservativeness=0.01)
    planner, memory = sim.scheduler.planner, sim.scheduler.memory
    claims, incoming = planner.claims, [make_req(sim, f"in-{i}", 30, leg="decode") for i in range(5)]
    for i, req in enumerate(incoming):
        req.times.turn = i
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == incoming[:4]
    for req in incoming[:4]:
        claims.requested(req, 1.0)
    first = outgoing = make_req(sim, "outgoing", 10 if before else 50, leg="prefill")
    outgoing.times.turn = 9
    planner.came(outgoing)
    planner.waiting.add(outgoing)
    if before:
        first = make_req(sim, "local", before, leg="prefill")
        first.route, first.times.turn = Route.LOCAL, 8
        planner.waiting.add(first)
    assert claims.to_revoke(1.5) == []
    victims = claims.to_revoke(2.0 + STALL_SECONDS)
    assert victims == (incoming[3:0:-1] if before else incoming[3:1:-1])
    assert claims.to_revoke(2.1 + STALL_SECONDS) == []
    for req in victims:
        memory.finish(req)
        claims.revoked(req)
    assert claims.grant_incoming(4.0) == []
    assert claims.first(4.0) is first
    assert next(claims.computing(4.0)) is first
    assert memory.admit(first, claims.reserve(first), prefix_limit=0)
    planner.forget(first.rid)
    assert [req.rid for req in claims.eligible(4.0)][:2] == [victims[-1].rid, victims[-2].rid]
