"""What each routing policy chooses, and what it keeps."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import weakref
from collections import Counter
from pathlib import Path

import pytest

from pdserve.router.attempts import Attempt
from pdserve.router.errors import BadRequestError
from pdserve.router.facts import Facts
from pdserve.router.fleet import Fleet
from pdserve.router.instance import HealthReport, HealthState, Instance, ReportedPace, Role
from pdserve.router.load import work
from pdserve.router.options import RouterOptions
from pdserve.router.policies.base import Policy
from pdserve.router.policies.factory import make_policy
from pdserve.router.policies.options import PolicyOptions
from pdserve.router.policies.registry import POLICIES
from pdserve.router.recent_failures import RecentFailures
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import Offer, Pair
from pdserve.router.work import Answering, Computing
from pdserve.runtime.cluster_secret import RouterKeys
from pdserve.runtime.python import python_command

EMPTY = RequestBody.parse(b"{}")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_fleet(policy: str, workers: int = 0, pairs: int = 0, **options: object) -> Fleet:
    urls = {"worker": [f"http://w{i}" for i in range(workers)]}
    urls |= {role: [f"http://{role[0]}{i}" for i in range(pairs)] for role in ("prefill", "decode")}
    fleet = Fleet(RouterOptions(policy=policy, **urls, **options))
    for instance in fleet.instances:
        fleet.set_state(instance, HealthState.HEALTHY, "test")
    return fleet


def facts_of(text: str = "x", *headers: tuple[bytes, bytes], **fields: object) -> Facts:
    return Facts(RequestBody.parse(json.dumps({"text": text, **fields}).encode()), headers)


def text_of(name: int, size: int = 6000) -> str:
    return random.Random(name).randbytes(size // 2).hex()


def choose(fleet: Fleet, facts: Facts | None = None) -> tuple[str, ...]:
    """Choose for a request, let it be served at once, and return the hosts."""
    facts = facts or Facts(EMPTY)
    target = fleet.pick(facts)
    assert target is not None
    with Attempt(fleet.policy, target, facts) as attempt:
        attempt.began()
        return tuple(one.host for one in target) if isinstance(target, Pair) else (target.host,)


def report(instance: Instance, token_ms: float, stream_ms: float = 1.0) -> None:
    instance.learn(HealthReport(pace=ReportedPace(token_ms, token_ms, stream_ms, 0.0, 999)))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_keeps_to_the_offer(policy):
    fleet = make_fleet(policy, pairs=3)
    p, d, w = fleet.instances[:3], fleet.instances[3:], [Instance("http://w", Role.UNIFIED)]
    facts = facts_of(text_of(1), user="a")
    for _ in range(20):
        with Attempt(fleet.policy, Pair(p[2], d[2]), facts) as attempt:  # which is not offered
            attempt.began()
        pair = fleet.policy.choose(Offer(p[:2], d[:1]), facts)
        assert isinstance(pair, Pair)
        assert pair.prefill in p[:2]
        assert pair.decode is d[0]
        assert fleet.policy.choose(Offer(p[:1]), facts) is p[0]
        assert fleet.policy.choose(Offer(workers=w), facts) is w[0]
    w[0].prompt_tokens = 9
    assert isinstance(fleet.policy.choose(Offer(p, d, w), facts), Pair)
    for prefill in p:
        prefill.prompt_tokens = 10
    assert fleet.policy.choose(Offer(p, d, w), facts) is w[0]


@pytest.mark.parametrize("policy", ["random", "round_robin", "power_of_two", "least_load"])
def test_a_policy_without_need_for_facts_computes_none(policy):
    fleet, facts = make_fleet(policy, workers=2, pairs=2), facts_of(text_of(1), user="a")
    choose(fleet, facts)
    assert not {"blocks", "session_key"} & vars(facts).keys()


def test_power_of_two_avoids_the_busiest_and_uses_all_others():
    fleet = make_fleet("power_of_two", workers=4)
    fleet.instances[1].answers = 5
    counts = Counter(choose(fleet)[0] for _ in range(200))
    assert set(counts) == {"w0", "w2", "w3"}
    fleet.instances[2].prompt_tokens = 1
    assert {choose(fleet)[0] for _ in range(200)} == {"w0", "w2", "w3"}  # w2 wins against w1 alone


def test_the_least_load_counts_prompts_and_answers():
    fleet = make_fleet("least_load", workers=3)
    w0, w1, w2 = fleet.instances
    w0.prompt_tokens, w1.answers, w2.answers = 1000, 3, 4
    assert choose(fleet) == ("w1",)
    with Answering(w1, 2):
        assert choose(fleet) == ("w0",)
    computing = Computing(w1, 257)
    assert choose(fleet) == ("w0",)
    computing.done()
    assert choose(fleet) == ("w1",)


def test_equal_instances_take_turns():
    fleet = make_fleet("least_load", workers=3, pairs=2)
    for instance in fleet.instances:
        instance.prompt_tokens = instance.in_flight = 7 if instance.host[0] == "w" else 0
    assert [choose(fleet) for _ in range(4)] == [("p0", "d0"), ("p1", "d1")] * 2


def test_the_least_load_of_pairs_is_chosen_leg_by_leg():
    fleet = make_fleet("least_load", pairs=2)
    p0, p1, d0, d1 = fleet.instances
    p0.prompt_tokens, d1.answers = 10, 1
    assert choose(fleet) == ("p1", "d0")
    p1.prompt_tokens, d0.answers = 20, 2
    assert choose(fleet) == ("p0", "d1")
    assert d1.prompt_tokens == p0.answers == 0


def test_reported_paces_count_if_all_report():
    fleet = make_fleet("least_load", pairs=2)
    d0, d1 = fleet.instances[2:]
    d0.answers = 9
    report(d0, token_ms=10)
    assert choose(fleet)[1] == "d1"  # it has not reported
    d1.answers = 12
    assert choose(fleet)[1] == "d0"
    d1.answers = 0
    report(d1, token_ms=20)
    assert choose(fleet)[1] == "d0"
    d0.answers += 11  # of 1 ms each
    assert choose(fleet)[1] == "d1"


def test_a_slower_worker_gets_less():
    fleet = make_fleet("least_load", workers=2)
    fast, slow = fleet.instances
    report(fast, token_ms=10, stream_ms=0)
    report(slow, token_ms=30, stream_ms=0)
    facts = facts_of("x" * 400)
    places = []
    for _ in range(12):
        target = fleet.pick(facts)
        Answering(target).__enter__()
        places.append(target)
    assert places.count(fast) == 9


@pytest.mark.parametrize(("policy", "requests"), [("least_load", 12), ("power_of_two", 400)])
@pytest.mark.parametrize("pairs", [0, 3])
def test_instances_without_requests_are_equal(policy, requests, pairs):
    """A report that was wrong once is renewed by requests alone."""
    fleet = make_fleet(policy, workers=0 if pairs else 3, pairs=pairs)
    for instance, failures in zip(fleet.instances, [20, 14, 11] * 2, strict=False):
        report(instance, token_ms=10.0 + failures)
        for _ in range(failures):
            instance.recent_failures.add()
    for legs in zip(*(choose(fleet) for _ in range(requests)), strict=True):
        counts = Counter(legs)
        assert len(counts) == 3
        assert min(counts.values()) >= requests / 4


def test_a_busy_instance_that_is_fast_comes_before_a_slow_one_without_requests():
    fleet = make_fleet("least_load", workers=3)
    fast, *slow = fleet.instances
    for instance in slow:
        report(instance, token_ms=50)
    report(fast, token_ms=5)
    fast.answers = 1
    assert {choose(fleet) for _ in range(6)} == {("w0",)}
    fast.answers = 20
    assert {choose(fleet) for _ in range(6)} == {("w1",), ("w2",)}


@pytest.mark.parametrize("pairs", [0, 2])
@pytest.mark.parametrize("reported_ms", [None, 1.0, 0.0])
def test_an_instance_that_refused_or_failed_gets_less_but_some(pairs, reported_ms):
    fleet = make_fleet("least_load", workers=0 if pairs else 2, pairs=pairs)
    if reported_ms is not None:
        for instance in fleet.instances:
            report(instance, token_ms=10, stream_ms=reported_ms)
    bad = fleet.instances[2 if pairs else 0]  # the first decode, or the first worker
    clock = Clock()
    bad.recent_failures = RecentFailures(clock)
    bad.recent_failures.add()
    facts = facts_of()
    places = []
    for _ in range(12):
        target = fleet.pick(facts)
        place = target.decode if isinstance(target, Pair) else target
        Answering(place).__enter__()
        places.append(place)
    assert places[:2] == [places[0]] * 2
    assert bad not in places[:2]
    assert places.count(bad) >= 3
    clock.now += 60
    bad.answers = places[0].answers - 1
    assert bad in (fleet.pick(facts) if pairs else [fleet.pick(facts)])


def test_an_instance_that_refuses_all_requests_attracts_few():
    fleet = make_fleet("least_load", workers=4)
    clock, bad = Clock(), fleet.instances[0]
    bad.recent_failures = RecentFailures(clock)
    for instance in fleet.instances[1:]:
        instance.answers = 20
    refused = 0
    for _ in range(100):  # in 10 s
        clock.now += 0.1
        if fleet.pick(Facts(EMPTY)) is bad:
            refused += 1
            bad.recent_failures.add()
    assert 5 < refused < 30


@pytest.mark.parametrize("policy", ["power_of_two", "least_load"])
def test_a_prefill_that_refused_gets_less(policy):
    fleet = make_fleet(policy, pairs=2)
    fleet.instances[0].recent_failures.add()
    assert {choose(fleet)[0] for _ in range(20)} == {"p1"}


def test_a_decode_that_reports_that_answers_cost_nothing_does_not_get_all():
    fleet = make_fleet("least_load", pairs=2)
    d0, d1 = fleet.instances[2:]
    report(d0, token_ms=10, stream_ms=0)
    report(d1, token_ms=11, stream_ms=0)
    for _ in range(40):
        Answering(fleet.pick(Facts(EMPTY)).decode).__enter__()
    assert 20 < d0.answers < 26
    assert d1.answers == 40 - d0.answers


SESSIONS = [f"conversation {number}" for number in range(400)]


def test_a_session_stays_and_sessions_are_spread():
    fleet = make_fleet("session", workers=4, pairs=4)
    for instance in fleet.instances:
        instance.prompt_tokens = 0 if instance.host[0] == "w" else 1
    places = {key: choose(fleet, facts_of(prompt_cache_key=key)) for key in SESSIONS}
    assert all(choose(fleet, facts_of("other", prompt_cache_key=key)) == places[key] for key in SESSIONS)
    counts = Counter(places.values())
    assert len(counts) == 4
    assert 70 <= min(counts.values()) <= max(counts.values()) <= 130
    pairs = make_fleet("session", pairs=4)
    assert len({choose(pairs, facts_of(prompt_cache_key=key)) for key in SESSIONS}) == 16


def test_an_instance_that_goes_moves_only_its_own_sessions():
    fleet = make_fleet("session", workers=4)
    before = {key: choose(fleet, facts_of(user=key)) for key in SESSIONS}
    fleet.set_state(fleet.instances[1], HealthState.UNHEALTHY, "gone")
    after = {key: choose(fleet, facts_of(user=key)) for key in SESSIONS}
    moved = {key for key in SESSIONS if before[key] != after[key]}
    assert moved == {key for key in SESSIONS if before[key] == ("w1",)}
    assert {after[key] for key in moved} == {("w0",), ("w2",), ("w3",)}


def session_places(path: str | None) -> list[str]:
    """Return where 100 session keys lead a router with the cluster secret of the file ``path``."""
    fleet = make_fleet("session", workers=5, cluster_secret_file=path)
    return [choose(fleet, facts_of(user=key))[0] for key in SESSIONS[:100]]


def secret_file(folder: Path, *lines: str) -> str:
    path = folder / f"secret-{lines[0]}"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    return str(path)


def test_where_sessions_lead_depends_on_the_cluster_secret(tmp_path):
    """Otherwise, a client could compute keys that all lead to one instance."""
    first, second = "1" * 32, "2" * 32
    path = secret_file(tmp_path, first)
    places = session_places(path)
    assert set(places) == {f"w{i}" for i in range(5)}
    for other in (session_places(None), session_places(secret_file(tmp_path, second))):
        assert sum(a == b for a, b in zip(places, other, strict=True)) < 45
    # Routers with the key of routers instead, or in the middle of a change of the secret, agree.
    assert session_places(secret_file(tmp_path, *RouterKeys.load(path).text().split())) == places
    Path(path).unlink()
    assert session_places(secret_file(tmp_path, first, second)) == places


TWO_ROUTERS = """
from pdserve.router.facts import Facts
from pdserve.router.instance import Instance, Role
from pdserve.router.policies.options import PolicyOptions
from pdserve.router.policies.factory import make_policy
from pdserve.router.request_body import RequestBody
from pdserve.router.targets import Offer

policy = make_policy(PolicyOptions(policy="session"))
workers = [Instance(f"http://w{i}", Role.UNIFIED) for i in range(5)]
for key in range(100):
    body = RequestBody.parse(b'{"text": "x", "user": "%d"}' % key)
    print(policy.choose(Offer(workers=workers), Facts(body)).url)
"""


def test_two_routers_agree_about_sessions():
    answers = {
        subprocess.run(
            python_command("-c", TWO_ROUTERS), env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert len(set(answers.pop().split())) == 5


def test_a_session_leaves_an_instance_with_too_many_requests():
    fleet = make_fleet("session", workers=3, balance_abs_threshold=4, balance_rel_threshold=2.0)
    facts = facts_of(prompt_cache_key="a")
    home = fleet.pick(facts)
    idlest = next(i for i in fleet.instances if i is not home)
    for instance in fleet.instances:
        instance.answers = 10
    idlest.answers = 5
    assert fleet.pick(facts) is home  # 5 more, but only twice as many
    home.answers = 11
    assert fleet.pick(facts) is idlest
    home.answers, idlest.answers = 9, 5
    assert fleet.pick(facts) is home
    home.answers, idlest.answers = 5, 2
    assert fleet.pick(facts) is home  # 2.5 times as many, but only 3 more
    home.answers, home.handed_over, idlest.answers = 5, 6, 4
    assert fleet.pick(facts) is idlest


def test_a_session_leaves_an_instance_with_too_long_prompts():
    fleet = make_fleet("session", workers=3, balance_abs_threshold=4, balance_rel_threshold=2.0)
    short, long = facts_of(prompt_cache_key="a"), facts_of("x" * 80_000, prompt_cache_key="a")
    home = fleet.pick(short)
    idlest = next(i for i in fleet.instances if i is not home)
    for instance in fleet.instances:
        instance.prompt_tokens = 600
    idlest.prompt_tokens = 512
    home.prompt_tokens = 512 + 4 * 256  # 3 times as much, but no more than 4 requests' tokens more
    assert fleet.pick(short) is home
    home.prompt_tokens += 1
    assert fleet.pick(short) is idlest
    assert fleet.pick(long) is home  # its cache may save as much
    home.prompt_tokens = 512 + long.prompt_tokens
    assert fleet.pick(long) is home
    home.prompt_tokens += 1
    assert fleet.pick(long) is idlest
    for instance in fleet.instances:
        if instance is not home:
            instance.prompt_tokens = 20_400
    home.prompt_tokens = 2 * 20_400  # which is far more, but not more than twice as much
    assert fleet.pick(long) is home
    home.prompt_tokens += 1
    assert fleet.pick(long) is not home


def test_a_session_does_not_stay_for_a_prompt_that_is_longer_than_any():
    fleet = make_fleet("session", workers=2, balance_abs_threshold=0)
    facts = facts_of("x" * 80_000, prompt_cache_key="a")
    home = fleet.pick(facts)
    home.learn(HealthReport(pace=ReportedPace(10.0, 10.0, 1.0, 0.0, 4096)))
    home.prompt_tokens = 4096
    assert fleet.pick(facts) is home
    home.prompt_tokens += 1
    assert fleet.pick(facts) is not home


def test_huge_prompts_of_one_session_are_spread():
    fleet = make_fleet("session", workers=4)
    facts = facts_of("x" * 400_000, prompt_cache_key="a")
    for _ in range(8):
        Computing(fleet.pick(facts), facts.prompt_tokens)
    assert max(instance.prompt_tokens for instance in fleet.instances) <= 3 * facts.prompt_tokens


def test_requests_without_a_session_go_to_the_least_load():
    fleet = make_fleet("session", workers=3)
    fleet.instances[0].answers = fleet.instances[2].answers = 1
    for facts in (facts_of(user=None), facts_of(prompt_cache_key="", user="")):
        assert {choose(fleet, facts) for _ in range(5)} == {("w1",)}


def test_a_longer_prompt_follows_its_prefix():
    fleet = make_fleet("cache_aware", workers=4)
    places = {number: choose(fleet, facts_of(text_of(number))) for number in range(40)}
    assert len(set(places.values())) == 4
    for number in range(40):
        assert choose(fleet, facts_of(text_of(number) + text_of(100 + number))) == places[number]
    # The longest prefix decides.
    other = facts_of(text_of(1) + text_of(200))
    target = next(i for i in fleet.instances if (i.host,) != places[1])
    fleet.policy.began(target, other)
    assert choose(fleet, facts_of(text_of(1) + text_of(200) + text_of(201))) == (target.host,)
    assert choose(fleet, facts_of(text_of(1) + text_of(202))) in (places[1], (target.host,))


def test_an_instance_that_refuses_a_request_does_not_have_its_prefix():
    fleet = make_fleet("cache_aware", workers=2)
    w0, w1 = fleet.instances
    facts = facts_of(text_of(1))
    with pytest.raises(BadRequestError), Attempt(fleet.policy, w0, facts):
        raise BadRequestError("refused")
    w0.answers = 1
    assert fleet.pick(facts) is w1
    with Attempt(fleet.policy, w0, facts) as attempt:
        attempt.began()
    assert fleet.pick(facts) is w0


def test_one_api_key_does_not_empty_the_table_of_another():
    fleet = make_fleet("cache_aware", workers=2, cache_table_blocks=64)
    w0, w1 = fleet.instances

    def facts_with(key: str, number: int) -> Facts:
        return Facts(RequestBody.parse(json.dumps({"text": text_of(number)}).encode()), key_name=key)

    fleet.policy.began(w1, facts_with("a", 1))
    for number in range(2, 50):
        fleet.policy.began(w0, facts_with("b", number))
    w1.answers = 1
    assert fleet.pick(facts_with("a", 1)) is w1
    assert fleet.pick(facts_with("b", 1)) is w0


def test_both_legs_follow_the_prefix():
    fleet = make_fleet("cache_aware", pairs=4)
    p, d = fleet.instances[:4], fleet.instances[4:]
    fleet.policy.began(Pair(p[2], d[3]), facts_of(text_of(1)))
    assert {choose(fleet, facts_of(text_of(1) + str(i))) for i in range(5)} == {("p2", "d3")}


def test_of_several_instances_with_the_prefix_the_least_loaded_is_chosen():
    fleet = make_fleet("cache_aware", workers=4)
    for instance in fleet.instances[1:]:
        fleet.policy.began(instance, facts_of(text_of(1)))
    fleet.instances[1].answers = fleet.instances[3].answers = 1
    assert {choose(fleet, facts_of(text_of(1))) for _ in range(5)} == {("w2",)}


@pytest.mark.parametrize(("share", "follows"), [(0.31, True), (0.29, False)])
def test_a_prefix_that_is_too_short_is_not_followed(share, follows):
    fleet = make_fleet("cache_aware", workers=2, cache_threshold=0.3)
    w0, w1 = fleet.instances
    fleet.policy.began(w1, facts_of(text_of(1, 51200)[: int(51200 * share)]))
    w1.answers = 1
    assert fleet.pick(facts_of(text_of(1, 51200))) is (w1 if follows else w0)


def test_an_instance_with_too_many_requests_is_not_followed():
    fleet = make_fleet("cache_aware", pairs=2, balance_abs_threshold=4, balance_rel_threshold=2.0)
    p0, p1, d0, d1 = fleet.instances
    facts = facts_of(text_of(1))
    fleet.policy.began(Pair(p0, d0), facts)
    d0.answers, d1.answers = 4, 0
    assert fleet.pick(facts).decode is d0
    d0.answers = 5
    assert fleet.pick(facts).decode is d1
    d0.answers, d1.answers = 10, 5
    assert fleet.pick(facts).decode is d0
    p0.prompt_tokens, p0.handed_over = 1, 4
    assert fleet.pick(facts).prefill is p0
    p0.handed_over = 5
    assert fleet.pick(facts).prefill is p1


def test_a_prefix_is_not_worth_a_longer_wait():
    fleet = make_fleet("cache_aware", workers=2)
    w0, w1 = fleet.instances
    facts = facts_of(text_of(1, 512 * 20))
    assert len(facts.blocks) == 20
    fleet.policy.began(w0, facts)
    w0.prompt_tokens = 20 * 512 // 4
    assert fleet.pick(facts) is w0
    w0.prompt_tokens += 1
    assert fleet.pick(facts) is w1
    w1.prompt_tokens = 1
    assert fleet.pick(facts) is w0


def test_a_prefix_saves_no_more_tokens_than_an_instance_takes():
    fleet = make_fleet("cache_aware", workers=2, balance_abs_threshold=0)
    w0, w1 = fleet.instances
    facts = facts_of(text_of(1, 80_000))
    fleet.policy.began(w0, facts)
    w0.learn(HealthReport(pace=ReportedPace(10.0, 10.0, 1.0, 0.0, 4096)))
    w0.prompt_tokens = 4000
    assert fleet.pick(facts) is w0
    w0.prompt_tokens = 4097
    assert fleet.pick(facts) is w1


def test_what_follows_the_blocks_of_a_prompt_is_not_saved():
    fleet = make_fleet("cache_aware", workers=2, balance_abs_threshold=0)
    w0, w1 = fleet.instances
    facts = facts_of(text_of(1, 4 << 20))
    fleet.policy.began(w0, facts)
    w0.prompt_tokens = (1 << 20) // 4
    assert fleet.pick(facts) is w0
    w0.prompt_tokens += 1
    assert fleet.pick(facts) is w1


def test_a_prefix_at_a_decode_is_worth_more_answers_than_it_saves_tokens():
    fleet = make_fleet("cache_aware", pairs=2, balance_abs_threshold=8)
    p0, _, d0, _ = fleet.instances
    facts = facts_of(text_of(1))
    fleet.policy.began(Pair(p0, d0), facts)
    d0.answers = 8
    assert work(d0) > facts.prompt_tokens
    assert fleet.pick(facts) == (p0, d0)


def test_an_instance_that_was_started_anew_has_no_prefixes():
    fleet = make_fleet("cache_aware", workers=2)
    w0, w1 = fleet.instances
    w0.learn(HealthReport(epoch="a"))
    fleet.set_state(w0, HealthState.HEALTHY, "test")
    facts = facts_of(text_of(1))
    fleet.policy.began(w0, facts)
    w0.answers = 1
    fleet.report_failure(w0, "a failure")
    fleet.set_state(w0, HealthState.HEALTHY, "test")
    assert fleet.pick(facts) is w0
    w0.learn(HealthReport(epoch="b"))
    fleet.set_state(w0, HealthState.HEALTHY, "test")
    assert fleet.pick(facts) is w1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_kept_of_instances_that_are_gone(policy):
    made = make_policy(PolicyOptions(policy=policy))
    facts = facts_of(text_of(1), user="a")
    kept, sizes = [], []
    for number in range(300):
        instance = Instance(f"http://w{number}", Role.UNIFIED)
        made.joined(instance)
        with Attempt(made, made.choose(Offer(workers=[instance, instance]), facts), facts) as attempt:
            attempt.began()
        made.left(instance)
        kept.append(weakref.ref(instance))
        del instance, attempt
        sizes.append(state_size(made))
    gc.collect()
    assert not [ref for ref in kept if ref() is not None]
    assert sizes[50] == sizes[-1]


def state_size(policy: Policy) -> int:
    """Return the number of entries in all containers of a policy."""
    parts = [part for value in vars(policy).values() for part in (value, *getattr(value, "__dict__", {}).values())]
    return sum(len(part) for part in parts if hasattr(part, "__len__"))
