"""Whether a decode computes a prompt itself or has it computed: what it decides, and that nothing is lost by it."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from support.handovers import named
from support.sim import SimInstance, make_generate, make_options, reference_output
from support.sim_pair import SimPair, assert_all_returned, run_until_idle

from pdserve.disaggregation.handover import placement_stage
from pdserve.disaggregation.handover.peer import Reading
from pdserve.disaggregation.handover.placement_policy import PlacementPolicy
from pdserve.disaggregation.handover.receiver_rooms import ReceiverRooms
from pdserve.messages.handover import Declined, Forecast, ForecastRequest, RoomQueued, TransferRequest
from pdserve.messages.requests import AbortReq
from pdserve.runtime.options import OptionError, check_options
from pdserve.scheduler.estimates.outcomes import HALF_LIFE, Line
from pdserve.scheduler.fairness import FairShares
from pdserve.scheduler.first_token import NOTHING, Load
from pdserve.scheduler.req import Req, ReqState
from pdserve.server.options import ServerOptions

FAR = 1e6


class Fixed:
    """A forecast that says what it is told."""

    def __init__(self, ms: float = 0.0, uncached: int = 0) -> None:
        self.here_ms, self.tokens = ms, uncached

    def first_token_ms(self, req: Req, uncached: int, now: float, expected: Load = NOTHING) -> float:
        return self.here_ms

    def uncached(self, req: Req) -> int:
        return self.tokens


def a_req() -> Req:
    sim = SimInstance()
    sim.submit("a", range(9))
    return sim.scheduler.reqs["a"]


@pytest.mark.parametrize(
    ("threshold", "uncached", "short"),
    [
        ("always", 1, False),
        ("0", 0, False),
        ("10", 9, True),
        ("10", 10, False),
        ("never", 10**6, True),
        ("auto", 1, False),
    ],
)
def test_a_threshold_is_a_number_of_tokens_to_be_computed_here(threshold, uncached, short):
    choice = PlacementPolicy(threshold, Fixed(uncached=uncached))
    assert choice.is_short(a_req()) is short
    assert (choice.here.prompts, choice.there.prompts) == (short, not short and threshold != "auto")
    assert choice.asks == (threshold == "auto")


@pytest.mark.parametrize("threshold", ["", "-1", "sometimes", "1.5", "٣"])
def test_what_is_no_threshold_is_refused(threshold):
    with pytest.raises(OptionError, match="--disaggregation-threshold"):
        check_options(ServerOptions(disaggregation_threshold=threshold))


def test_the_sooner_one_is_taken_with_the_time_that_kv_needs():
    choice, req = PlacementPolicy("auto", Fixed(ms=100.0)), a_req()

    def is_here(there_ms: float, pages: int, prefill: str = "p") -> bool:
        return choice.is_here(req, prefill, there_ms, 0, pages, now=1.0)

    assert not is_here(90.0, 10)
    assert is_here(110.0, 10)
    for pages in [10, 20] * 50:
        choice.learn_lag("p", pages, 0.002 * pages, now=1.0)
    assert is_here(90.0, 10)
    assert not is_here(90.0, 2)
    assert not is_here(90.0, 10, "another prefill")
    assert (choice.here.prompts, choice.there.prompts) == (2, 3)


def test_forecasts_are_corrected_by_how_they_came_out():
    choice, req = PlacementPolicy("auto", Fixed(ms=100.0)), a_req()
    for _ in range(60):
        here = choice.is_here(req, "p", 80.0, 0, 0, now=1.0)
        # Whatever is said, there it takes twice as long.
        choice.on_first_token(req, 1.0 + (0.1 if here else 0.16))
        assert req.first_token_estimate is None
    assert choice.is_here(req, "p", 80.0, 0, 0, now=1.0)
    assert not choice.is_here(req, "another", 80.0, 0, 0, now=1.0)
    assert choice.there.actual_seconds == pytest.approx(0.16 * (choice.there.prompts - 1))


def test_what_was_learned_of_short_prompts_does_not_count_for_long_ones():
    """What is added to each is no factor."""
    line = Line(1.0)
    for i in range(40):
        line.learn(i % 3, 8.0 + i % 3, now=1.0)
    assert line.at(0, 1.0) == pytest.approx(8.0, rel=0.15)
    assert line.at(1000, 1.0) == pytest.approx(1008.0, rel=0.25)
    for x in (200, 1000) * 20:
        line.learn(x, 8.0 + 1.5 * x, now=1.0)
    assert line.at(1000, 1.0) == pytest.approx(1508.0, rel=0.05)


def test_one_outcome_that_means_nothing_does_little():
    line = Line(1.0)
    for _ in range(10):
        line.learn(100.0, 100.0, now=1.0)
    line.learn(100.0, 1e9, now=1.0)
    assert line.at(100.0, 1.0) < 135.0
    lag = Line(0.0)
    lag.learn(1, 60_000.0, now=1.0)
    assert lag.at(1000, 1.0) < 1000.0


def test_who_hangs_is_not_thought_fast():
    choice, req = PlacementPolicy("auto", Fixed(ms=100.0)), a_req()
    for _ in range(20):
        choice.is_here(req, "p", 50.0, 0, 0, now=1.0)
        choice.on_cancelled(req, 1.04)  # its client left early: that says nothing
    assert not choice.is_here(req, "p", 50.0, 0, 0, now=1.0)
    tries = 0
    while not choice.is_here(req, "p", 50.0, 0, 0, now=1.0):
        choice.on_cancelled(req, 9.0)
        assert req.first_token_estimate is None
        tries += 1
    assert 0 < tries < 10
    assert choice.there.actual_seconds == 0


def test_slow_links_are_learned():
    lag = PlacementPolicy("auto", Fixed())._learned("p").lag
    for pages in (4, 40, 400) * 100:
        lag.learn(pages, 16.0 * pages, now=1.0)
    assert lag.at(400, 1.0) == pytest.approx(6400.0, rel=0.1)


def test_what_was_learned_is_forgotten():
    line = Line(1.0)
    for _ in range(40):
        line.learn(100.0, 400.0, now=1.0)
    assert line.at(100.0, 1.0) > 300.0
    assert line.at(100.0, 1.0 + 10 * HALF_LIFE) == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_no_line_estimates_less_than_nothing(slope):
    rng = random.Random(7)
    for _ in range(300):
        line = Line(slope)
        for _ in range(rng.randint(0, 12)):
            line.learn(rng.expovariate(0.01), rng.choice([0.0, rng.expovariate(0.01)]), now=1.0)
        a, b = line.fit(1.0)
        assert a >= 0
        assert 0 <= b <= 4


def test_a_prefill_that_is_behind_is_not_waited_for():
    pair = SimPair(disaggregation_threshold="auto", disable_radix_cache=True)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    pair.decode.submit("streams", range(60, 70), max_new_tokens=150)
    for i in range(6):
        pair.prefill.submit(f"before{i}", range(100 + i, 130 + i), max_new_tokens=2)
    pair.submit("b", range(40, 70), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 4)
    assert pair.decode.tokens["b"] == reference_output(range(40, 70), 4)
    assert pair.decode.ends["b"].meta.route == "local"
    assert pair.prefill.ends["b"].finish.message.startswith("the decode instance computes")
    assert pair.decode.choice.here.prompts >= 1
    assert_all_returned(pair)


def test_a_prompt_that_a_decode_computes_after_all_counts_as_its_tenants_share(monkeypatch):
    charged: list[int] = []
    prompt = FairShares.prompt

    def charge(shares, tenant, tokens: int) -> None:
        charged.append(tokens)
        prompt(shares, tenant, tokens)

    pair = SimPair(disaggregation_threshold="auto", disable_radix_cache=True, fair_scheduling=True)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    pair.decode.submit("streams", range(60, 70), max_new_tokens=150)
    for i in range(6):
        pair.prefill.submit(f"before{i}", range(100 + i, 130 + i), max_new_tokens=2)
    monkeypatch.setattr(FairShares, "prompt", charge)
    pair.submit("b", range(40, 71), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.ends["b"].meta.route == "local"
    assert 31 in charged


def test_of_many_that_ask_at_once_each_is_told_of_those_before():
    """Though none of them waits here yet; and no longer of those that have declined."""
    pair = SimPair(disable_radix_cache=True)
    senders = pair.prefill.senders

    def ask(number: int) -> float:
        pair.submit(f"r{number}", range(100 * number, 100 * number + 40), number, legs=("prefill",))
        senders.on_queued(pair.peer, RoomQueued("prefill", named(number, 1, "decode")), pair.now)
        for _ in range(3):  # however often it is asked
            senders.on_forecast_request(pair.peer, ForecastRequest("prefill", named(number, 1, "decode")), pair.now)
        (forecast,) = pair.peer.unsent
        pair.peer.unsent.clear()
        return forecast.ms

    forecasts = [ask(number) for number in range(1, 6)]
    assert all(later > earlier for earlier, later in itertools.pairwise(forecasts))
    for number in range(2, 6):
        senders.on_declined(pair.peer, Declined("prefill", named(number, 1, "decode")), pair.now)
    assert ask(6) == pytest.approx(forecasts[1])
    for number in (1, 6):
        senders.on_declined(pair.peer, Declined("prefill", named(number, 1, "decode")), pair.now)
    assert senders.estimates.expected == NOTHING
    run_until_idle(pair)
    assert_all_returned(pair)


@pytest.mark.parametrize("logprobs", [None, (0, 0)])
def test_what_is_cached_as_a_whole_leaves_something_to_be_computed(logprobs):
    """One token, to sample; or all that are to be scored."""
    pair = SimPair(disaggregation_threshold="auto")
    prompt = range(8)  # whole pages
    pair.submit("a", prompt, 1, max_new_tokens=4)
    run_until_idle(pair)
    pair.decode.choice = pair.decode.receivers.placement._policy = PlacementPolicy(
        "auto", Fixed(ms=-1.0)
    )  # sooner than anywhere
    pair.submit("b", prompt, 2, max_new_tokens=4, logprobs=logprobs)
    run_until_idle(pair)
    assert pair.decode.ends["b"].meta.route == "local"
    assert pair.decode.tokens["b"] == reference_output(prompt, 4)
    if logprobs is not None:
        (scores,) = [item.prompt.logprobs for item in pair.decode.items["b"] if item.prompt is not None]
        assert len(scores) == len(prompt)
    assert_all_returned(pair)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", ["never", "12", "auto"])
def test_nothing_is_lost_wherever_prompts_are_computed(threshold, seed):
    rng = random.Random(seed)
    pair = SimPair(disaggregation_threshold=threshold, max_total_tokens=512)
    prompts = {}
    for i in range(10):
        prompts[f"r{i}"] = [rng.randrange(97) for _ in range(rng.randint(1, 24))]
        pair.submit(f"r{i}", prompts[f"r{i}"], i + 1, max_new_tokens=rng.randint(1, 6))
        for _ in range(rng.randint(0, 120)):
            rng.choice(pair.moves())()
    run_until_idle(pair, random.Random(seed))
    for rid, prompt in prompts.items():
        assert pair.decode.tokens[rid] == reference_output(prompt, len(pair.decode.tokens[rid])), rid
        assert pair.decode.ends[rid].finish.type == "length"
    here = {rid for rid in prompts if pair.decode.ends[rid].meta.route == "local"}
    if threshold != "auto":
        limit = 12 if threshold == "12" else FAR
        # What is cached need not be computed; with these prompts that is a token or two.
        assert {rid for rid, prompt in prompts.items() if len(prompt) < limit} <= here
        assert pair.decode.choice.here.prompts == len(here)
    assert_all_returned(pair)


@pytest.mark.parametrize("late", [False, True])
def test_the_prefill_s_leg_ends_well_also_where_it_comes_late(late):
    pair = SimPair(disaggregation_threshold="never")
    pair.submit("a", range(9), 1, legs=("decode",) if late else ("prefill", "decode"), max_new_tokens=3)
    rng = random.Random(1)
    for _ in range(200):
        rng.choice(pair.moves())()
        pair.advance()
    while pair.to_prefill:
        pair.deliver_to_prefill()
    if late:
        pair.submit("a", range(9), 1, legs=("prefill",))
    pair.prefill.plan()
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(9), 3)
    assert pair.prefill.ends["a"].finish.type == "declined"
    counters = pair.prefill.scheduler.counters
    assert (counters.declined, counters.moved, counters.handed_over) == (1, 0, 0)
    assert pair.prefill.senders.failed == pair.decode.receivers.failed == 0
    assert_all_returned(pair)


@pytest.mark.parametrize("what", ["abort", "link"])
def test_who_computes_itself_needs_no_prefill(what):
    pair = SimPair(disaggregation_threshold="never")
    pair.submit("a", range(9), 1, legs=("decode",), max_new_tokens=3)
    if what == "abort":
        pair.decode.scheduler.abort(AbortReq("a"))
    else:
        pair.lose_link()
    run_until_idle(pair)
    if what == "link":
        assert pair.decode.tokens["a"] == reference_output(range(9), 3)
    else:
        assert pair.decode.ends["a"].finish.type == "abort"
    assert_all_returned(pair)


def test_rooms_that_wait_to_tell_their_prefill_are_not_counted_for_each(monkeypatch) -> None:
    """Thousands may wait while the prefill is dialled, and each tick goes through them."""
    counts = {}
    for rooms in (5, 50):
        pair = SimPair(disaggregation_threshold="never", max_queued_requests=100)
        pair.link.reading = Reading.WANTED
        for room in range(1, rooms + 1):
            pair.submit(f"r{room}", range(9), room, legs=("decode",), max_new_tokens=1)
        searched = []
        in_state = ReceiverRooms.in_state
        monkeypatch.setattr(ReceiverRooms, "in_state", lambda *args, f=in_state, s=searched: s.append(args) or f(*args))
        pair.advance()
        monkeypatch.undo()
        assert len(pair.decode.receivers.rooms) == rooms
        counts[rooms] = len(searched)
        pair.link.reading = Reading.READY
        run_until_idle(pair)
        assert_all_returned(pair)
    assert counts[5] == counts[50]


def test_of_too_many_rooms_that_wait_to_tell_their_prefill_some_end(monkeypatch) -> None:
    monkeypatch.setattr(placement_stage, "MOST_UNTOLD", 3)
    pair = SimPair(disaggregation_threshold="never", max_queued_requests=100)
    pair.link.reading = Reading.WANTED
    for room in range(1, 8):
        pair.submit(f"r{room}", range(9), room, legs=("decode",), max_new_tokens=1)
    pair.advance()
    assert set(pair.decode.receivers.rooms) == {5, 6, 7}
    pair.link.reading = Reading.READY
    run_until_idle(pair)
    assert not pair.decode.receivers.rooms
    assert_all_returned(pair)


def test_a_room_that_was_declined_is_over():
    pair = SimPair()
    senders, name = pair.prefill.senders, named(1, 1, "decode")
    pair.submit("a", range(9), 1, legs=("prefill",))
    senders.on_forecast_request(pair.peer, ForecastRequest("prefill", name), pair.now)
    (forecast,) = pair.peer.unsent
    assert isinstance(forecast, Forecast)
    senders.on_declined(pair.peer, Declined("prefill", name), pair.now)
    senders.on_request(pair.peer, TransferRequest("prefill", name, 9, 1, 0, [bytes(12)]), pair.now)
    senders.on_declined(pair.peer, Declined("prefill", name), pair.now)
    assert senders.rooms == {}
    run_until_idle(pair)
    assert_all_returned(pair)


@pytest.mark.parametrize("ms", [-1.0, float("nan"), float("inf"), 1e10])
def test_a_forecast_that_is_no_duration_does_not_get_in(ms):
    raw = msgspec.msgpack.encode(Forecast("e", named(1), 1.0)).replace(
        msgspec.msgpack.encode(1.0), msgspec.msgpack.encode(ms)
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Forecast)


def test_an_instance_estimates_what_it_then_takes():
    """In steps: each of them costs the same here."""
    sim = SimInstance(make_options(chunked_prefill_size=8, max_total_tokens=512, disable_overlap_schedule=True))
    for step in range(40):
        sim.submit(f"warm{step}", range(step, step + 8), max_new_tokens=1)
    sim.run_until_idle()
    forecast = sim.scheduler.estimator._first_token
    sim.submit("a", range(200, 232))
    sim.submit("b", range(300, 364))
    a, b = sim.scheduler.reqs["a"], sim.scheduler.reqs["b"]
    assert forecast.uncached(b) == 64
    now = sim.now
    assert forecast.ms(b, 64, now) > forecast.ms(a, 32, now) > 0
    assert forecast.ms(b, 16, now) < forecast.ms(b, 64, now) < forecast.ms(b, 64, now, Load(2, 80))
    sim.plan()
    sim.work()
    sooner = forecast.ms(b, 64, now)
    sim.plan()
    sim.work()
    assert forecast.ms(b, 64, now) < sooner


@pytest.mark.parametrize(("policy", "ahead"), [("fcfs", [0, 400, 440]), ("srpf", [48, 8, 0])])
def test_only_requests_that_the_queue_admits_first_count(policy, ahead):
    """Where the shortest goes first, a long prompt that came before is none of its business."""
    sim = SimInstance(make_options(schedule_policy=policy, max_running_requests=1, max_total_tokens=4096))
    sim.submit("runs", range(9), max_new_tokens=400)
    sim.plan()
    lengths = {"long": 400, "short": 40, "shortest": 8}
    for number, (rid, length) in enumerate(lengths.items()):
        sim.submit(rid, range(1000 * (number + 1), 1000 * (number + 1) + length))
    forecast, reqs = sim.scheduler.estimator._first_token, sim.scheduler.reqs
    for number, rid in enumerate(lengths):
        reqs[rid].times.fcfs_time += number * 1e-6
    loads = [forecast._ahead_of(reqs[rid], length).tokens for rid, length in lengths.items()]
    assert loads == ahead


def test_a_request_of_high_priority_expects_those_of_its_own_that_came_after_many_others():
    options = {"max_running_requests": 1, "max_queued_requests": 4000, "max_total_tokens": 4096}
    sim = SimInstance(make_options(**options, schedule_policy="priority"))
    sim.submit("runs", range(9), max_new_tokens=400)
    sim.plan()
    for i in range(600):
        message = make_generate(f"r{i}", range(50, 60))
        message.priority = 9 * (i >= 300)
        sim.scheduler.arrivals.admit(message, sim.now)
    message = make_generate("last", range(8), place=1)
    message.priority = 9
    sim.scheduler.arrivals.admit(message, sim.now)
    load = sim.scheduler.estimator._first_token._ahead_of(sim.scheduler.reqs["last"], 8)
    assert load.prompts == pytest.approx(301, rel=0.02)  # the running one is in the middle of its prompt


def test_what_the_worker_computes_already_is_not_computed_again():
    sim = SimInstance(make_options(chunked_prefill_size=64, max_total_tokens=512))
    for step in range(40):
        sim.submit(f"warm{step}", range(step, step + 8), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("a", range(200, 232))
    req, forecast = sim.scheduler.reqs["a"], sim.scheduler.estimator._first_token
    waiting = forecast.ms(req, 32, sim.now)
    sim.plan()
    req.state = ReqState.SENDING  # as one that is computed for another instance
    assert 0 < forecast.ms(req, 32, sim.now) < 1.5 * waiting
    assert forecast.compute_ms(req, 32) == pytest.approx(waiting)


def test_of_thousands_that_wait_all_count():
    sim = SimInstance(make_options(max_running_requests=1, max_queued_requests=4000, max_total_tokens=4096))
    sim.submit("runs", range(9), max_new_tokens=400)
    sim.plan()

    def behind(number: int) -> Load:
        for i in range(number - len(sim.scheduler.planner.waiting)):
            sim.submit(f"w{number}.{i}", range(50, 60))
        sim.submit("last", range(8), max_new_tokens=1, place=number)  # behind them all
        req = sim.scheduler.reqs["last"]
        next(iter(sim.scheduler.planner.waiting.values())).times.fcfs_time = (
            req.times.fcfs_time + 60
        )  # one of them comes later
        load = sim.scheduler.estimator._first_token._ahead_of(req, 8)
        sim.scheduler.abort(AbortReq("last"))
        return load

    assert behind(200).prompts == 199
    many = behind(2000)
    assert many.prompts == pytest.approx(1999, abs=10)
    assert many.tokens == pytest.approx(19990, rel=0.01)
