"""Choice of members for a request, and requests without any."""

from collections import Counter

import pytest

from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthReport, HealthState, ReportedPace, Role
from pdserve.router.options import RouterOptions
from pdserve.router.policies.registry import POLICIES
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import Pair, legs
from pdserve.router.work import MAX_ANSWERS, Answering, Computing
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Server

BODY = RequestBody.parse(b"{}")


def make_fleet(policy="round_robin", prefill=1, decode=1, worker=0, unhealthy=(), **options):
    names = {"prefill": prefill, "decode": decode, "worker": worker}
    urls = {role: [f"http://{role}{i}" for i in range(count)] for role, count in names.items()}
    fleet = Fleet(RouterOptions(policy=policy, **urls, **options))
    for instance in fleet.instances:
        state = HealthState.UNHEALTHY if instance.host in unhealthy else HealthState.HEALTHY
        fleet.set_state(instance, state, "test")
    return fleet


def chosen(fleet, failed=(), body=BODY):
    target = fleet.pick(Facts(body), [i for i in fleet.instances if i.host in failed])
    if isinstance(target, Pair):
        return target.prefill.host, target.decode.host
    return target.host if target else None


def test_round_robin_gives_each_its_turn():
    fleet = make_fleet(prefill=2, decode=3)
    counts = Counter(host for _ in range(12) for host in chosen(fleet))
    assert counts == {"prefill0": 6, "prefill1": 6, "decode0": 4, "decode1": 4, "decode2": 4}


def test_random_uses_all():
    fleet = make_fleet("random", prefill=2, decode=2)
    assert len({chosen(fleet) for _ in range(200)}) == 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_unhealthy_are_never_chosen(policy):
    fleet = make_fleet(policy, prefill=2, decode=2, unhealthy=("prefill0", "decode1"))
    assert {chosen(fleet) for _ in range(50)} == {("prefill1", "decode0")}


def test_workers_serve_while_no_pair_can():
    assert chosen(make_fleet(worker=1)) == ("prefill0", "decode0")
    assert chosen(make_fleet(worker=1, unhealthy=("prefill0",))) == "worker0"
    nobody = make_fleet(worker=1, unhealthy=("decode0", "worker0"))
    assert (chosen(nobody), nobody.can_serve()) == (None, False)


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "at_worker", "expected"),
    [
        ((0, 0), (0, 1), (0, 0), "worker0"),
        ((500, 1), (0, 1), (0, 3), "worker0"),
        ((500, 1), (0, 1), (500, 1), ("prefill0", "decode0")),
        ((500, 1), (0, 2), (500, 1), "worker0"),
        ((500, 1), (0, 1), (600, 1), ("prefill0", "decode0")),
    ],
)
def test_pairs_and_workers_share_the_load(at_prefill, at_decode, at_worker, expected):
    fleet = make_fleet(worker=1)
    for instance, (tokens, requests) in zip(fleet.instances, (at_prefill, at_decode, at_worker), strict=True):
        instance.prompt_tokens, instance.in_flight = tokens, requests
    assert chosen(fleet) == expected


def test_at_most_half_of_a_role_is_out_of_rotation_and_its_only_instance_never():
    fleet = make_fleet(prefill=2, decode=3, worker=1)
    p0, p1, d0, d1, d2, w = fleet.instances
    p0.breaker.ask(9)
    d1.breaker.ask(9)
    assert {chosen(fleet) for _ in range(6)} == {("prefill1", "decode0"), ("prefill1", "decode2")}
    assert fleet.has_others(BODY, [w])
    # The ones that opened their breakers first stay out.
    for instance in (d0, d2, p1, w):
        instance.breaker.ask(9)
    assert fleet.in_rotation(Role.DECODE) == [d0, d2]
    assert fleet.in_rotation(Role.PREFILL) == [p1]
    assert fleet.in_rotation(Role.UNIFIED) == [w]
    assert {chosen(fleet)[0] for _ in range(4)} == {"prefill1"}
    # Half of those that are there.
    fleet.set_state(d1, HealthState.UNHEALTHY, "gone")
    assert fleet.in_rotation(Role.DECODE) == [d2]


def test_a_retry_goes_elsewhere_while_there_is_an_elsewhere():
    assert chosen(make_fleet(prefill=2, decode=2), failed=("prefill0", "decode0")) == ("prefill1", "decode1")
    assert chosen(make_fleet(worker=1), failed=("prefill0", "decode0")) == "worker0"
    assert chosen(make_fleet(prefill=2), failed=("prefill0", "decode0")) == ("prefill1", "decode0")
    assert chosen(make_fleet(), failed=("prefill0", "decode0")) == ("prefill0", "decode0")


def test_a_retry_prefers_instances_without_an_earlier_attempt():
    def hosts(fleet, *tried):
        picked = {fleet.pick(Facts(BODY), [], [i for i in fleet.instances if i.host in tried]) for _ in range(6)}
        return {tuple(i.host for i in legs(target)) for target in picked}

    pairs = make_fleet(prefill=2, decode=2)
    assert hosts(pairs, "prefill0", "decode1") == {("prefill1", "decode0")}
    assert len(hosts(pairs, "prefill0", "decode1", "prefill1", "decode0")) == 2
    workers = make_fleet(prefill=0, decode=0, worker=2)
    assert hosts(workers, "worker0") == {("worker1",)}
    assert hosts(workers, "worker0", "worker1") == {("worker0",), ("worker1",)}


def test_a_failure_takes_an_instance_out_until_the_next_check():
    fleet = make_fleet()
    fleet.report_failure(fleet.instances[0], "connection reset")
    assert chosen(fleet) is None
    assert (fleet.can_serve(), fleet.undecided()) == (False, True)
    assert fleet.instances[0].check_now.is_set()


def test_a_prompt_counts_until_it_is_computed():
    prefill, worker = make_fleet(decode=0, worker=1).instances
    with Computing(prefill, 30), Computing(worker, 40) as computing:
        assert (prefill.prompt_tokens, worker.prompt_tokens) == (30, 40)
        computing.done()
        assert (prefill.prompt_tokens, worker.prompt_tokens) == (30, 0)
    assert (prefill.prompt_tokens, worker.prompt_tokens) == (0, 0)


def test_what_a_client_sends_counts_for_no_more_than_it_can_take():
    (worker,) = make_fleet(prefill=0, decode=0, worker=1).instances
    with Computing(worker, 10**6):
        assert worker.prompt_tokens == 10**6  # its limit is unknown
    worker.learn(HealthReport(pace=ReportedPace(10.0, 10.0, 1.0, 0.0, 4096)))
    with Computing(worker, 10**6), Computing(worker, 10**6, 3), Answering(worker, 2000), Answering(worker, 5):
        assert (worker.prompt_tokens, worker.answers) == (4 * 4096, MAX_ANSWERS + 5)
    assert (worker.prompt_tokens, worker.answers) == (0, 0)


@pytest.mark.parametrize("found", ["by a check", "by a request"])
def test_the_remaining_instance_is_asked_again_before_a_client_is_refused(found):
    """The prefill may be a decode by now, which the router was not told yet."""
    fleet = make_fleet(prefill=2, decode=1)
    *others, gone = fleet.instances
    assert not fleet.undecided()
    if found == "by a request":
        fleet.report_failure(gone, "no connection")
        assert fleet.undecided()
    fleet.set_state(gone, HealthState.UNHEALTHY, "it drains")
    assert chosen(fleet) is None
    assert all(other.check_now.is_set() for other in others)
    for other in others:
        assert fleet.undecided()
        fleet.answered_again(other)
    assert not fleet.undecided()


EMBED = RequestBody.parse(b'{"input": "a"}', facts=path_table(Server.ROUTER).find("/v1/embeddings"))


def test_a_prompt_alone_goes_to_a_prefill_and_no_decode_is_needed():
    fleet = make_fleet(prefill=2, decode=1, unhealthy=("decode0",))
    assert {chosen(fleet, body=EMBED) for _ in range(4)} == {"prefill0", "prefill1"}
    assert {chosen(fleet, ("prefill0",), EMBED) for _ in range(4)} == {"prefill1"}
    assert chosen(make_fleet(prefill=1, unhealthy=("prefill0",)), body=EMBED) is None
    failed = fleet.instances[:1]
    assert fleet.has_others(EMBED, failed)
    assert not fleet.has_others(BODY, failed)
    assert not fleet.has_others(EMBED, fleet.instances)


def test_a_prompt_alone_goes_to_the_prefill_or_worker_with_less_to_compute():
    fleet = make_fleet(prefill=1, worker=1)
    prefill, _, worker = fleet.instances
    assert chosen(fleet, body=EMBED) == "prefill0"
    prefill.prompt_tokens = 10
    assert chosen(fleet, body=EMBED) == "worker0"
    worker.prompt_tokens = 20
    assert chosen(fleet, body=EMBED) == "prefill0"
    # One that has failed is asked again only if there is no other.
    assert chosen(fleet, ("prefill0",), EMBED) == "worker0"
    assert chosen(fleet, ("prefill0", "worker0"), EMBED) == "prefill0"
