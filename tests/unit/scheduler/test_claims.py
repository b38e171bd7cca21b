"""The queue of claims: one order for requests that compute here and for those whose KV comes from peers, the limit of
what is reserved, and reservations that are asked back.
"""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from support.handovers import named
from support.sim import SimInstance, SimWindow, make_generate, make_options, reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, run_until_idle
from support.world.campaign import Campaign
from support.world.node import HOST, Node

from pdserve.messages.handover import Abort, Forecast, TransferRequest, Withdraw, Withdrawn
from pdserve.messages.outputs import Phase
from pdserve.messages.requests import AbortReq, Bootstrap, GenerateReq
from pdserve.scheduler.claims import STALL_SECONDS, Claims
from pdserve.scheduler.optional_claims import MOST_OPTIONAL
from pdserve.scheduler.req import Foreseen, Req, ReqState, Route


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
                slot.node.manager.membership.register()


@pytest.mark.parametrize("seed", range(1, 7))
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
        """Until all is over."""
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
    monkeypatch.setattr(Claims, "_patience", lambda claims, req: STALL_SECONDS)
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


@pytest.mark.parametrize("answers", [False, True], ids=["leg missing", "forecast under way"])
def test_a_reservation_that_waits_for_a_forecast_is_asked_back(answers: bool) -> None:
    """The prefill makes none before the client's leg is there, and makes one only."""
    pair = SimPair(max_total_tokens=48, disaggregation_threshold="auto", enable_priority_scheduling=True)
    submit(pair, "r1", prompt_of(1), room=1, legs=("prefill", "decode") if answers else ("decode",))
    for _ in range(3):
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
    assert states(pair) == {"r1": "PREALLOCATED"}
    submit(pair, "local", prompt_of(2, 40), priority=50)
    pair.now += STALL_SECONDS
    pair.advance()
    assert states(pair) == {"r1": "QUEUED"}
    pair.decode.scheduler.check_invariants()
    forecasts = [message for message in pair.to_decode if isinstance(message, Forecast)]
    assert len(forecasts) == answers
    while pair.to_prefill or pair.to_decode:
        (pair.deliver_to_prefill if pair.to_prefill else pair.deliver_to_decode)()
    assert (pair.decode.receivers.rooms[1].there_ms is not None) == answers
    for _ in range(20):
        pair.decode.plan()
        pair.decode.work()
    assert "local" in pair.decode.ends
    if not answers:
        submit(pair, "r1", prompt_of(1), room=1, legs=("prefill",))
    run_until_idle(pair)
    assert pair.decode.tokens["r1"] == reference_output(prompt_of(1), 4)
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
    return SimInstance(make_options(**{"handover": "on", "schedule_policy": "fcfs"} | changes))


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


def make_req(sim: SimInstance, rid: str, length: int, leg: str, outputs: int = 4) -> Req:
    """A request that was taken in."""
    route = Route.OUTGOING if leg == "prefill" else Route.INCOMING
    message = make_generate(rid, prompt_of(zlib.crc32(rid.encode()) % 50, length), max_new_tokens=outputs)
    return Req.create(message, route, ReqState.BOOTSTRAPPING, outputs, 1)


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


def test_reservations_do_not_take_the_last_row_from_a_prompt_for_a_peer() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=3)
    claims = sim.scheduler.planner.claims
    claims.came(make_req(sim, "outgoing", 20, leg="prefill"))
    incoming = [make_req(sim, f"in-{i}", 20, leg="decode") for i in range(3)]
    for i, req in enumerate(incoming):
        req.times.turn = i
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(0.0) == incoming[:2]


def test_hand_overs_leave_rows_to_local_requests_that_wait_for_compute() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=3)
    planner = sim.scheduler.planner
    for i in range(2):
        local = make_req(sim, f"local-{i}", 20, leg="prefill")
        local.route, local.times.turn = Route.LOCAL, i
        planner.waiting.add(local)
    incoming = [make_req(sim, f"in-{i}", 20, leg="decode") for i in range(2)]
    for i, req in enumerate(incoming):
        req.times.turn = 5 + i
        planner.claims.add_incoming(req, 0, optional=False)
    assert planner.claims.grant_incoming(0.0) == incoming[:1]


def test_a_claim_that_lacks_windows_within_the_limit_gets_reservations_of_lower_rank() -> None:
    options = make_options(handover="on", max_total_tokens=512, enable_priority_scheduling=True)
    sim = SimInstance(options, window=SimWindow(8, 64))
    claims = sim.scheduler.planner.claims
    claims.came(make_req(sim, "outgoing", 20, leg="prefill"))
    low = [make_req(sim, f"low-{i}", 20, leg="decode") for i in range(6)]
    for i, req in enumerate(low):
        req.times.turn = i
        claims.add_incoming(req, 0, optional=False)
    granted = claims.grant_incoming(1.0)
    assert 1 < len(granted) < 6
    high = make_req(sim, "high", 20, leg="decode")
    high.msg, high.times.turn = msgspec.structs.replace(high.msg, priority=1), 9
    claims.add_incoming(high, 0, optional=False)
    assert claims.grant_incoming(1.0) == []
    assert claims.to_revoke(1.0 + STALL_SECONDS) == [granted[-1]]
    sim.scheduler.memory.finish(granted[-1])
    claims.revoked(granted[-1])
    assert claims.grant_incoming(1.0 + STALL_SECONDS) == [high]


def reserve(sim: SimInstance, count: int, length: int = 30) -> list[Req]:
    """Reservations whose senders were asked at time 1."""
    claims = sim.scheduler.planner.claims
    incoming = [make_req(sim, f"in-{i}", length, leg="decode") for i in range(count)]
    for i, req in enumerate(incoming):
        req.times.turn = i
        claims.add_incoming(req, length, optional=False)
    assert claims.grant_incoming(1.0) == incoming
    for req in incoming:
        claims.requested(req, 1.0)
    return incoming


def wait_outgoing(sim: SimInstance, length: int) -> Req:
    """A prompt for a peer, which came after them."""
    req = make_req(sim, "outgoing", length, leg="prefill")
    req.times.turn = 9
    sim.scheduler.planner.came(req)
    sim.scheduler.planner.waiting.add(req)
    return req


def test_a_reservation_that_holds_a_row_and_no_memory_of_its_own_is_asked_back_for_the_row() -> None:
    sim = both_ways(max_total_tokens=512, max_running_requests=1, page_size=4)
    planner = sim.scheduler.planner
    cached = make_req(sim, "cached", 32, leg="decode")
    cached.msg = msgspec.structs.replace(cached.msg, rid="x")
    first = make_req(sim, "cached", 32, leg="prefill")
    assert planner.claims._memory.admit(first, planner.claims.reserve(first), prefix_limit=0)
    first.computed = 32
    planner.claims._memory.finish(first)
    planner.claims.add_incoming(cached, 32, optional=False)
    assert planner.claims.grant_incoming(1.0) == [cached]
    assert cached.reused == 32
    planner.claims.requested(cached, 1.0)
    wait_outgoing(sim, 20)
    assert planner.claims.to_revoke(1.0 + 2 * STALL_SECONDS) == [cached]


def test_a_sender_that_does_not_answer_is_asked_once_and_others_are_asked_then() -> None:
    sim = both_ways(max_total_tokens=128, schedule_conservativeness=0.01)
    incoming = reserve(sim, 4)
    wait_outgoing(sim, 30)
    claims, asked, now = sim.scheduler.planner.claims, [], 1.0
    while len(asked) < 4 and now < 20:
        now += STALL_SECONDS / 2
        asked += claims.to_revoke(now)
    assert sorted(req.rid for req in asked) == [req.rid for req in incoming]


def test_each_time_that_a_request_gives_memory_back_it_may_keep_it_longer() -> None:
    sim = both_ways(max_total_tokens=64, schedule_conservativeness=0.01)
    (victim,) = reserve(sim, 1, 50)
    planner = sim.scheduler.planner
    claims, memory, waits = planner.claims, sim.scheduler.memory, []
    for _ in range(4):
        outgoing, since = wait_outgoing(sim, 50), 100.0 * len(waits) + 1
        now = since
        while not claims.to_revoke(now):
            now += STALL_SECONDS / 16
        waits.append(now - since)
        memory.finish(victim)
        claims.revoked(victim)
        planner.ended(outgoing)
        assert claims.grant_incoming(since + 100) == [victim]
        claims.requested(victim, since + 100)
    for times, wait in enumerate(waits):
        assert STALL_SECONDS * 2**times <= wait <= STALL_SECONDS * 2 ** (times + 1) + STALL_SECONDS / 16


def test_incoming_claims_that_lack_memory_for_outputs_yield_to_a_prompt_for_a_peer() -> None:
    """Nothing runs here, the reservation is to write a long output, and its peer waits for what is computed here."""
    sim = both_ways(max_total_tokens=144)
    claims = sim.scheduler.planner.claims
    holder, second = (make_req(sim, rid, 40, leg="decode", outputs=100) for rid in ("holder", "second"))
    for turn, req in enumerate((holder, second)):
        req.times.turn = turn
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == [holder]
    claims.requested(holder, 1.0)
    outgoing = wait_outgoing(sim, 20)
    assert next(claims.computing(1.5), None) is None
    assert claims.to_revoke(1.0 + STALL_SECONDS) == []
    assert next(claims.computing(1.0 + STALL_SECONDS), None) is outgoing


def test_nothing_is_granted_to_hand_overs_while_the_only_running_request_lacks_a_page() -> None:
    sim = both_ways(max_total_tokens=128)
    claims = sim.scheduler.planner.claims
    incoming = make_req(sim, "incoming", 30, leg="decode")
    claims.add_incoming(incoming, 0, optional=False)
    claims.starved = make_req(sim, "lone", 30, leg="prefill")
    assert claims.grant_incoming(0.0) == []
    claims.starved = None
    assert claims.grant_incoming(0.0) == [incoming]


def test_few_optional_claims_that_do_not_fit_are_tried_in_a_turn() -> None:
    sim = both_ways(max_total_tokens=64)
    claims = sim.scheduler.planner.claims
    for i in range(100):
        claims.add_incoming(make_req(sim, f"optional-{i}", 70, leg="decode"), 0, optional=True)
    tries: list[Req] = []
    grant = claims._grant
    claims._grant = lambda req, *args: tries.append(req) or grant(req, *args)  # type: ignore[method-assign]
    assert claims.grant_incoming(0.0) == []
    assert len(tries) == MOST_OPTIONAL


@pytest.mark.parametrize("shares", [False, True], ids=["one line", "fair shares"])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "srpf"])
def test_of_many_optional_claims_few_are_in_the_order(policy: str, shares: bool) -> None:
    """So thousands, of as many tenants, cost a turn no more. Computing claims behind them have the order they had."""
    sim = both_ways(max_total_tokens=256, schedule_policy=policy, fair_scheduling=shares)
    planner, claims = sim.scheduler.planner, sim.scheduler.planner.claims
    for i in range(100):
        req = make_req(sim, f"optional-{i}", 300, leg="decode")
        req.msg, req.times.turn = msgspec.structs.replace(req.msg, user=f"user-{i}"), i
        claims.add_incoming(req, 0, optional=True)
    local = [make_req(sim, f"local-{i}", 40, leg="prefill") for i in range(3)]
    for i, req in enumerate(local):
        req.route, req.times.turn = Route.LOCAL, 100 + i
        planner.waiting.add(req)
    assert len(planner.waiting) == 103
    assert claims.grant_incoming(1.0) == []
    assert claims.first(1.0) is local[0]
    assert list(claims.computing(1.0)) == local
    assert len(list(planner.waiting.order())) == MOST_OPTIONAL + 3
    assert len(planner.waiting._lanes) <= MOST_OPTIONAL + 1
    for rid in list(planner.waiting):
        planner.forget(rid)
    assert not len(planner.waiting)
    assert not planner.waiting._lanes
    assert not planner.waiting._parked


def test_optional_claims_take_the_places_of_those_that_are_over() -> None:
    sim = both_ways(max_total_tokens=64, enable_priority_scheduling=True)
    claims, waiting = sim.scheduler.planner.claims, sim.scheduler.planner.waiting

    def add(rid: str, turn: int, length: int = 70, priority: int = 0) -> Req:
        req = make_req(sim, rid, length, leg="decode")
        req.msg, req.times.turn = msgspec.structs.replace(req.msg, priority=priority), turn
        claims.add_incoming(req, 0, optional=True)
        return req

    reqs = [add(f"o{i}", i) for i in range(MOST_OPTIONAL + 2)]
    claims.forget("o3")
    assert list(waiting.order()) == reqs[:3] + reqs[4 : MOST_OPTIONAL + 1]
    high = add("high", 99, priority=1)
    assert list(waiting.order()) == [high, *reqs[:3], *reqs[4:MOST_OPTIONAL]]
    claims.forget("high")
    claims.forget("o9")
    assert list(waiting.order()) == reqs[:3] + reqs[4 : MOST_OPTIONAL + 1]


def test_all_optional_claims_that_fit_are_granted_at_once() -> None:
    sim = both_ways(max_total_tokens=1024, max_running_requests=64)
    claims = sim.scheduler.planner.claims
    reqs = [make_req(sim, f"optional-{i}", 10, leg="decode") for i in range(3 * MOST_OPTIONAL)]
    for i, req in enumerate(reqs):
        req.times.turn = i
        claims.add_incoming(req, 0, optional=True)
    assert claims.grant_incoming(1.0) == reqs
    assert not len(sim.scheduler.planner.waiting)


def test_a_moved_request_that_is_retracted_depends_on_memory_like_any_other() -> None:
    sim = both_ways(max_total_tokens=64)
    planner, claims = sim.scheduler.planner, sim.scheduler.planner.claims
    moved = make_req(sim, "moved", 20, leg="decode")
    claims.add_incoming(moved, 0, optional=True)
    assert claims.grant_incoming(1.0) == [moved]
    planner.running[moved.rid] = moved
    claims.landed(moved.rid)
    sim.scheduler.memory.finish(moved)
    moved.route, moved.retractions = Route.LOCAL, 1
    planner.waiting.add(moved)
    assert claims.first(1.0) is moved


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "srpf", "lof"])
def test_computing_claims_pass_incoming_ones_that_the_limit_holds_up_each_once(policy: str) -> None:
    sim = both_ways(max_total_tokens=128, schedule_policy=policy)
    reserve(sim, 2)
    planner, outgoing = sim.scheduler.planner, []
    for i in range(6):
        req = make_req(sim, f"w{i}", 60, leg="decode" if i % 2 else "prefill")
        req.times.turn = 10 + i
        if i % 2:
            planner.claims.add_incoming(req, 0, optional=False)
        else:
            planner.came(req)
            planner.waiting.add(req)
            outgoing.append(req)
    assert sorted(req.rid for req in planner.claims.computing(2.0)) == [req.rid for req in outgoing]
    assert planner.claims.first(2.0) in outgoing


# --- what a withdrawal leaves ---


@pytest.mark.parametrize("served", [0, 200], ids=["equal shares", "others had more"])
def test_a_withdrawn_request_has_its_place_among_tenants(served: int) -> None:
    """Its tenant has asked all the time: it is neither behind equals that came later, nor lifted to the clock."""
    sim = both_ways(max_total_tokens=64, fair_scheduling=True)
    planner = sim.scheduler.planner
    claims, shares = planner.claims, planner.waiting.shares
    assert shares is not None
    reqs = [make_req(sim, f"in-{i}", 40, leg="decode") for i in range(3)]
    for i, req in enumerate(reqs):
        req.msg, req.times.turn = msgspec.structs.replace(req.msg, key_name=f"tenant-{i}"), i
        planner.came(req)
        claims.add_incoming(req, 0, optional=False)
    assert claims.grant_incoming(1.0) == reqs[:1]
    for i in (1, 2):
        shares.prompt(reqs[i].tenant, i * served)
    sim.scheduler.memory.finish(reqs[0])
    claims.revoked(reqs[0])
    assert list(planner.waiting.order()) == reqs
    assert shares.share(reqs[0].tenant) == (0.0, 0.0)
    for req in reqs:
        planner.ended(req)
    assert not planner.waiting._lanes


def withdrawn() -> SimPair:
    """``r2`` has given its memory back; the news that it is queued anew has not reached the prefill."""
    pair = asked_back()
    while pair.to_prefill:
        pair.deliver_to_prefill()
    while pair.to_decode:
        pair.deliver_to_decode()
    assert states(pair)["r2"] == "QUEUED"
    return pair


def test_what_waits_in_the_prefills_queue_is_no_transfer_though_it_is_withdrawn() -> None:
    req = withdrawn().decode.scheduler.reqs["r2"]
    assert req.phases.spent(Phase.TRANSFER) == 0
    assert req.phases.spent(Phase.QUEUE, "prefill") >= STALL_SECONDS * 1000


def test_nothing_is_learned_from_a_forecast_whose_prompt_was_withdrawn() -> None:
    pair = asked_back()
    req = pair.decode.scheduler.reqs["r2"]
    req.foreseen = Foreseen("prefill", 1.0, 1.0, pair.now)
    while pair.to_prefill:
        pair.deliver_to_prefill()
    while pair.to_decode:
        pair.deliver_to_decode()
    assert req.foreseen is None


def test_an_answer_that_nobody_asked_for_takes_no_memory_back() -> None:
    pair = reserved(SimPair(max_total_tokens=80))
    receiver = next(r for r in pair.decode.receivers.rooms.values() if r.req.rid == "r1")
    pair.to_decode.append(Withdrawn("decode", receiver.handover, begun=False))
    while pair.to_decode:
        pair.deliver_to_decode()
    assert states(pair)["r1"] == "TRANSFERRING"
    assert pair.decode.receivers.withdrawn == 0


def test_a_prefill_whose_client_leaves_between_two_attempts_tells_the_next_one() -> None:
    """It has the name of the attempt before, which the decode has left."""
    pair = withdrawn()
    pair.prefill.scheduler.abort(AbortReq("r2", "gone"))
    began = pair.now
    for _ in range(20):
        pair.advance()
        while pair.to_prefill:
            pair.deliver_to_prefill()
        while pair.to_decode:
            pair.deliver_to_decode()
    assert "r2" not in pair.decode.scheduler.reqs
    assert pair.now - began < 1
    run_until_idle(pair, random.Random(6))
    assert_all_returned(pair)


def test_a_request_that_is_withdrawn_has_no_more_time_to_wait_for_memory() -> None:
    pair = withdrawn()
    receiver = pair.decode.receivers.rooms[2]
    pair.now = receiver.queued_at + LIMITS.queue
    pair.advance()
    assert pair.decode.ends["r2"].status == 504
    run_until_idle(pair)
    assert_all_returned(pair)


def test_a_room_without_a_request_that_is_withdrawn_again_and_again_ends() -> None:
    pair = SimPair()
    since, senders = pair.now, pair.prefill.senders
    for attempt in range(1, 4):
        name = named(1, attempt, "decode")
        senders.on_request(pair.peer, TransferRequest("prefill", name, 9, 1, 0, [bytes(12)]), pair.now)
        assert len(senders.rooms) == 1
        pair.now = since + attempt * 0.3 * LIMITS.bootstrap
        senders.on_withdraw(pair.peer, Withdraw("prefill", name), pair.now)
    pair.now = since + 1.1 * LIMITS.bootstrap
    senders.tick(pair.now)
    assert not senders.rooms
