"""Fair shares: counters and their clock, what is remembered, and what a client gains by a new user for each request."""

from __future__ import annotations

import itertools
import random

import pytest
from support.counted_calls import counted_calls
from support.sim import SimInstance, make_generate, make_options, reference_output

from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import AbortReq
from pdserve.scheduler.fairness import FEW, MOST_REMEMBERED, OUTPUT_WEIGHT, FairShares, Tenant
from pdserve.scheduler.policies.sort_key import FirstComeFirstServed
from pdserve.scheduler.req import Req, ReqState, Route
from pdserve.scheduler.waiting import WaitingQueue


def served(shares: FairShares, tenant: Tenant, work: int) -> None:
    """Let a request of the tenant come, wait, be computed, and end."""
    shares.comes(tenant)
    shares.waits(tenant)
    shares.waits_no_more(tenant)
    shares.prompt(tenant, work)
    shares.goes(tenant)


def comes_to_wait(shares: FairShares, *tenants: Tenant) -> None:
    for tenant in tenants:
        shares.comes(tenant)
        shares.waits(tenant)


def test_shares_of_keys_count_before_those_of_users():
    shares = FairShares()
    a1, a2, b = Tenant("a", "1"), Tenant("a", "2"), Tenant("b")
    comes_to_wait(shares, a1, a2, b)
    shares.prompt(a1, 10)
    shares.output(b, 4)
    assert shares.share(a1) == (10, 10)
    assert shares.share(a2) == (10, 0)
    assert shares.share(b) == (4 * OUTPUT_WEIGHT, 4 * OUTPUT_WEIGHT)
    assert min((a1, a2, b), key=shares.share) == b


def test_a_token_of_output_weighs_as_much_as_two_of_a_prompt() -> None:
    """A decode step costs more than a token of a piece, and holds memory for longer."""
    one, other, tenant = FairShares(), FairShares(), Tenant("a", "a")
    one.output(tenant, 3)
    other.prompt(tenant, 6)
    assert one.share(tenant) == other.share(tenant) != (0.0, 0.0)


def test_who_was_away_is_no_creditor():
    shares = FairShares()
    busy, idle = Tenant("busy"), Tenant("idle")
    comes_to_wait(shares, busy)
    shares.prompt(busy, 1000)
    comes_to_wait(shares, idle)
    assert shares.share(idle)[0] == shares.share(busy)[0] == 1000


def test_nor_is_a_tenant_that_comes_when_none_waits():
    shares = FairShares()
    busy, idle = Tenant("busy"), Tenant("idle")
    shares.comes(Tenant("a stream"))  # with it the clock's own pace is half of busy's
    for _ in range(100):
        served(shares, busy, 1000)
    comes_to_wait(shares, idle, busy)
    assert shares.share(busy)[0] - shares.share(idle)[0] <= 1000


def test_with_a_stream_that_asks_for_little_the_clock_is_not_left_behind():
    """The clock's pace is halved by a tenant that never waits. A newcomer must not begin there."""
    shares = FairShares()
    stream, busy, new = Tenant("stream"), Tenant("busy"), Tenant("new")
    shares.comes(stream)
    comes_to_wait(shares, busy)
    for _ in range(1000):
        shares.prompt(busy, 100)
        shares.output(stream, 1)
    comes_to_wait(shares, new)
    assert shares.share(new)[0] == shares.share(busy)[0]


def test_nor_is_who_waited_before():
    """What is remembered of its place in the line says nothing of those that wait now."""
    shares = FairShares()
    stream, busy, back = Tenant("stream"), Tenant("busy"), Tenant("back")
    shares.comes(stream)
    comes_to_wait(shares, busy, back)
    shares.waits_no_more(back)
    shares.goes(back)
    for _ in range(1000):
        shares.prompt(busy, 100)
        shares.output(stream, 1)
    comes_to_wait(shares, back)
    assert shares.share(back)[0] == shares.share(busy)[0]


def test_who_comes_while_others_wait_for_what_runs_is_no_further_behind_than_they_are():
    shares = FairShares()
    runs, waits, new = Tenant("runs"), Tenant("waits"), Tenant("new")
    comes_to_wait(shares, runs)
    shares.waits_no_more(runs)
    comes_to_wait(shares, waits)
    shares.output(runs, 1000)
    comes_to_wait(shares, new)
    assert shares.share(new) == shares.share(waits)


@pytest.mark.parametrize("seed", range(5))
def test_who_comes_begins_between_the_lowest_and_the_highest_that_wait(seed: int):
    rng, shares = random.Random(seed), FairShares()
    tenants = [Tenant("", str(i)) for i in range(12)]
    waiting: list[Tenant] = []
    for tenant in tenants:  # each is known, with nothing done for it
        shares.comes(tenant)
        shares.prompt(tenant, 0)
    for _ in range(400):
        tenant = rng.choice(tenants)
        if tenant in waiting:
            waiting.remove(tenant)
            shares.waits_no_more(tenant)
        else:
            before, others = shares.share(tenant)[1], [shares.share(other)[1] for other in waiting]
            shares.waits(tenant)
            waiting.append(tenant)
            now = shares.share(tenant)[1]
            assert now >= before
            assert not others or min(others) <= now <= max(before, *others)
        shares.prompt(rng.choice(tenants), rng.randrange(100))


def test_a_flood_of_new_names_leaves_other_counters_alone():
    shares = FairShares()
    debtor, creditor = Tenant("a", "greedy"), Tenant("a", "modest")
    comes_to_wait(shares, debtor, creditor)
    shares.prompt(debtor, 100_000)
    shares.waits_no_more(debtor)
    shares.goes(debtor)
    before = shares.share(debtor)[1] - shares.share(creditor)[1]
    for i in range(20_000):
        served(shares, Tenant("hostile", f"name {i}"), 1000)
    assert shares.share(debtor)[1] - shares.share(creditor)[1] == before == 100_000
    assert shares.remembered <= 2 + 2 * MOST_REMEMBERED


def test_nor_below_the_same_key_for_less_than_the_debt():
    shares = FairShares()
    debtor, creditor = Tenant("", "greedy"), Tenant("", "modest")
    comes_to_wait(shares, debtor, creditor)
    shares.prompt(debtor, 10_000)
    shares.waits_no_more(debtor)
    shares.goes(debtor)
    owed = shares.share(debtor)[1]
    # Many at a time, so that their debts are above the clock, and are what is remembered.
    for start in range(0, 20_000, 100):
        names = [Tenant("", f"name {i}") for i in range(start, start + 100)]
        comes_to_wait(shares, *names)
        for name in names:
            shares.waits_no_more(name)
            shares.prompt(name, 1)
            shares.goes(name)
    assert shares.share(debtor)[1] == owed
    assert shares.share(creditor)[1] == 0
    assert shares.remembered <= 2 + 2 * MOST_REMEMBERED


def test_of_too_many_debts_the_smallest_are_let_off():
    shares = FairShares()
    names = [Tenant("", f"{i}") for i in range(6 * MOST_REMEMBERED)]
    comes_to_wait(shares, Tenant("", "lasting"), *names)
    for i, name in enumerate(names):
        shares.waits_no_more(name)
        shares.prompt(name, 1_000_000 + i)
    for name in reversed(names):
        shares.goes(name)
    assert 0 < shares.remembered <= 2 * MOST_REMEMBERED + 1
    assert shares.share(names[-1])[1] == 1_000_000 + len(names) - 1
    assert shares.share(names[0]) == shares.share(Tenant("", "never seen"))


@pytest.mark.parametrize("key", ["", "one key"])
def test_an_honest_user_gets_its_share_among_names_that_are_new_with_each_request(key: str):
    """Where each new name began as low as the lowest that waits, the honest one would have one turn, and no more."""
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=2, max_total_tokens=512))
    names, honest, waiting, turns = itertools.count(), itertools.count(), 8, 400

    def send(rid: str, user: str) -> None:
        msg = make_generate(rid, [len(rid), 1, 2], max_new_tokens=4)
        msg.key_name, msg.user, msg.arrival = key, user, sim.now
        sim.scheduler.arrivals.admit(msg, sim.now)

    for _ in range(turns):
        while sum(req.msg.user != "honest" for req in sim.scheduler.planner.waiting.values()) < waiting:
            number = next(names)
            send(f"new{number}", f"!{number}")  # the first of all names, should these be compared
        while sum(req.msg.user == "honest" for req in sim.scheduler.reqs.values()) < 3:
            send(f"honest{next(honest)}", "honest")
        sim.plan()
        sim.work()
    ended = [rid for rid in sim.ends if rid.startswith("honest")]
    # Beside eight that wait and two that run it has an eleventh. A newcomer goes ahead once, as it has had no service.
    assert len(ended) > len(sim.ends) / (waiting + 2 + 1) * 0.8
    assert all(sim.tokens[rid] == reference_output([len(rid), 1, 2], 4) for rid in ended)
    sim.scheduler.abort(AbortReq(""))
    sim.run_until_idle()
    sim.scheduler.check_invariants()


def test_prompts_are_charged_when_they_begin_and_cached_tokens_are_not():
    """All ask for one token of output, so that only their prompts tell them apart."""
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=1))

    def send(rid: str, user: str, prompt: list[int]) -> None:
        msg = make_generate(rid, prompt, max_new_tokens=1)
        msg.user = user
        sim.scheduler.arrivals.admit(msg, sim.now)

    for i in range(2):
        send(f"long{i}", "long", [i, *range(80)])
    for i in range(6):
        send(f"short{i}", "short", [50 + i, *range(10)])
    sim.run_until_idle()
    assert list(sim.ends) == ["long0", *(f"short{i}" for i in range(6)), "long1"]
    # Now that its prompt is cached, the same one costs next to nothing.
    sim.ends.clear()
    for i in range(2):
        send(f"again{i}", "again", [0, *range(80)])
    for i in range(3):
        send(f"other{i}", "other", [60 + i, *range(20)])
    sim.run_until_idle()
    assert list(sim.ends) == ["again0", "other0", "again1", "other1", "other2"]


def test_of_equals_who_has_waited_longest_goes_first():
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=1))
    for i, user in enumerate("zyxa"):
        msg = make_generate(f"r{i}", [i, 1], max_new_tokens=2)
        msg.user = user
        sim.scheduler.arrivals.admit(msg, sim.now)
    sim.run_until_idle()
    assert list(sim.ends) == ["r0", "r1", "r2", "r3"]


def test_a_full_queue_has_room_for_a_key_that_has_less_than_its_part():
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=2, max_queued_requests=8))

    def send(rid: str, key: str) -> str | None:
        msg = make_generate(rid, [1, 2, 3], max_new_tokens=4)
        msg.key_name, msg.user = key, rid
        refusal = sim.scheduler.arrivals.refusal(msg)
        sim.scheduler.arrivals.admit(msg, sim.now)
        return refusal.code if refusal is not None else None

    refused = [send(f"greedy{i}", "greedy") for i in range(20)]
    assert refused.count("key_limit_exceeded") == 10
    late = [send(f"late{i}", "late") for i in range(8)]
    assert late == [None] * 5 + ["key_limit_exceeded"] * 3
    third = [send(f"third{i}", "third") for i in range(5)]
    assert third == [None] * 3 + ["key_limit_exceeded"] * 2
    for i in range(100):
        send(f"more{i}", f"key {i}")
    assert len(sim.scheduler.reqs) == 10 + 5 + 3 + 7  # with ten keys there, no other key gets more
    sim.run_until_idle()
    assert not sim.scheduler.reqs


@pytest.mark.parametrize("fair", [False, True])
def test_a_queue_that_is_full_for_every_key_is_load(fair: bool) -> None:
    sim = SimInstance(make_options(fair_scheduling=fair, max_running_requests=1, max_queued_requests=3))

    def send(key: str, rid: str) -> str | None:
        msg = make_generate(rid, [1, 2, 3], max_new_tokens=4)
        msg.key_name = key
        refusal = sim.scheduler.arrivals.refusal(msg)
        sim.scheduler.arrivals.admit(msg, sim.now)
        return refusal.code if refusal is not None else None

    assert [send(f"key {i}", f"{i}") for i in range(4)] == [None] * 4
    assert [send(key, key) for key in ("key 0", "new", "", "(admin)")] == ["rate_limit_exceeded"] * 4
    sim.run_until_idle()


def test_clients_without_keys_fill_the_queue_as_one_and_that_is_load() -> None:
    sim = SimInstance(make_options(fair_scheduling=True, max_running_requests=1, max_queued_requests=3))
    codes = []
    for i in range(5):
        refusal = sim.scheduler.arrivals.refusal(msg := make_generate(f"{i}", [1, 2, 3], max_new_tokens=4))
        sim.scheduler.arrivals.admit(msg, sim.now)
        codes.append(refusal.code if refusal is not None else None)
    assert codes == [None] * 4 + ["rate_limit_exceeded"]
    sim.run_until_idle()


def test_without_fair_shares_a_full_queue_is_full_for_all():
    sim = SimInstance(make_options(max_running_requests=2, max_queued_requests=2))
    for i in range(5):
        msg = make_generate(f"r{i}", [1, 2, 3])
        msg.key_name = f"key {i}"
        sim.scheduler.arrivals.admit(msg, sim.now)
    assert len(sim.scheduler.reqs) == 4
    sim.run_until_idle()
    assert isinstance(sim.ends["r4"], ReqError)


@pytest.mark.parametrize("seed", range(10))
def test_the_queue_gives_the_order_that_a_plain_sort_would(seed: int):
    """Against the obvious: of all lanes, that of the lowest share, then the longest open; as things come and go."""
    rng = random.Random(seed)
    shares = FairShares()
    queue = WaitingQueue(FirstComeFirstServed(), shares, ranks=True)
    waiting: list[Req] = []
    opened: dict[tuple[int, Tenant], int] = {}

    def lane(req: Req) -> tuple[int, Tenant]:
        return queue.rank(req), req.tenant

    def place(req: Req) -> tuple:
        return queue.rank(req), shares.share(req.tenant), opened[lane(req)], req.times.fcfs_time

    for step in range(150):
        if rng.random() < 0.6 or not waiting:
            msg = make_generate(f"r{step}", [1, 2], max_new_tokens=4)
            msg.key_name, msg.user = rng.choice("ab"), rng.choice("xyz")
            msg.priority, msg.arrival = rng.choice((0, 0, 5)), float(step)
            req = Req.create(msg, Route.LOCAL, ReqState.WAITING, 4, 1)
            waiting.append(req)
            shares.comes(req.tenant)
            opened.setdefault(lane(req), step)
            queue.add(req)
        else:
            req = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(req.rid)
            if lane(req) not in map(lane, waiting):
                del opened[lane(req)]
            shares.prompt(req.tenant, rng.randrange(50))
            shares.goes(req.tenant)
        expected = sorted(waiting, key=place)
        assert list(itertools.islice(queue.order(), 3)) == expected[:3]
        assert list(queue.order()) == expected


def test_what_is_kept_of_lanes_that_are_gone_does_not_grow():
    shares = FairShares()
    queue = WaitingQueue(FirstComeFirstServed(), shares, ranks=True)
    for i in range(2000):
        msg = make_generate(f"r{i}", [1, 2])
        msg.user, msg.priority = f"user {i}", i % 500 if i % 2 else 0
        req = Req.create(msg, Route.LOCAL, ReqState.WAITING, 4, 1)
        shares.comes(req.tenant)
        queue.add(req)
        if i:
            queue.remove(req.rid)
            shares.goes(req.tenant)
    for turns in (queue._turns, queue._computing_turns):
        assert len(turns) == 1
        assert len(turns[0]) <= 2 * (2 + FEW)
    assert sum(len(users._line) for users in shares._users.values()) <= 4 + 2 * FEW


def queue_of_users(count: int, keys: int) -> WaitingQueue:
    shares = FairShares()
    queue = WaitingQueue(FirstComeFirstServed(), shares)
    for i in range(count):
        msg = make_generate(f"r{i}", [1, 2])
        msg.user, msg.key_name, msg.arrival = f"user {i}", f"key {i % keys}", float(i)
        req = Req.create(msg, Route.LOCAL, ReqState.WAITING, 4, 1)
        shares.comes(req.tenant)
        queue.add(req)
    return queue


def test_work_for_a_key_costs_the_queue_as_much_however_many_users_it_names() -> None:
    """Each admission and each output token is charged, so each step changes the share of every user of the key."""

    def calls_of_a_step(users: int) -> int:
        queue = queue_of_users(users, 1)
        with counted_calls() as calls:
            for _ in range(4):
                req = next(queue.order())
                queue.remove(req.rid)
                queue.shares.prompt(req.tenant, 10)
        return calls[0]

    assert calls_of_a_step(300) == calls_of_a_step(30)


@pytest.mark.parametrize("keys", [1, 10])
def test_an_order_of_all_costs_as_much_for_each_user_however_many_there_are(keys: int) -> None:
    def calls_of_orders(users: int) -> float:
        queue = queue_of_users(users, keys)
        with counted_calls() as calls:
            for _ in range(3):
                assert len(list(queue.order())) == users
                queue.shares.prompt(Tenant("key 0", "user 0"), 10)
        return calls[0] / users

    assert calls_of_orders(400) < 1.2 * calls_of_orders(100)
