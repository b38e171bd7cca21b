"""The scheduler over a simulated worker: every token right, every request ended once, every page given back."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.machine import limit
from support.sim import SimInstance, SimWindow, make_generate, make_options, reference_output

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.outputs import FinishType, ReqError, ReqTokens
from pdserve.messages.requests import AbortReq, StopReq
from pdserve.messages.worker import StepResult
from pdserve.scheduler.forks import Forks
from pdserve.scheduler.req import MAX_BATCH_SECONDS, Req, ReqState, Route


def assert_all_returned(sim: SimInstance) -> None:
    usage = sim.scheduler.memory.pool.usage()
    assert usage["in_use"] == 0
    assert usage["rows_in_use"] == 0
    sim.scheduler.check_invariants()


def end_of(sim: SimInstance, rid: str) -> ReqTokens:
    end = sim.ends[rid]
    assert isinstance(end, ReqTokens), end
    return end


def test_one_request_gives_the_reference_tokens_and_its_counts():
    sim = SimInstance()
    sim.submit("a", range(10), max_new_tokens=5)
    sim.run_until_idle()
    assert sim.tokens["a"] == reference_output(range(10), 5)
    end = end_of(sim, "a")
    assert end.finish.type is FinishType.LENGTH
    assert (end.meta.prompt_tokens, end.meta.completion_tokens, end.meta.cached_tokens) == (10, 5, 0)
    assert_all_returned(sim)


def test_repeated_prompt_is_a_prefix_hit_of_whole_pages():
    sim = SimInstance()
    for rid in ("a", "b"):
        sim.submit(rid, range(10), max_new_tokens=5)
        sim.run_until_idle()
    assert sim.tokens["a"] == sim.tokens["b"]
    assert end_of(sim, "b").meta.cached_tokens == 8
    assert_all_returned(sim)


def test_stop_token_ends_the_output_even_with_a_step_in_flight():
    prompt = [3, 1, 4, 1, 5]
    expected = reference_output(prompt, 20)
    stop = expected[6]
    sim = SimInstance()
    sim.submit("a", prompt, max_new_tokens=20, stop_ids=[stop])
    sim.run_until_idle()
    first = expected.index(stop)
    assert sim.tokens["a"] == expected[: first + 1]
    assert end_of(sim, "a").finish.matched == stop
    assert_all_returned(sim)


def test_two_steps_are_on_their_way_with_overlap_and_one_without():
    for disabled, depth in ((False, 2), (True, 1)):
        sim = SimInstance(make_options(disable_overlap_schedule=disabled))
        sim.submit("a", range(4), max_new_tokens=6)
        sim.plan()
        assert len(sim.to_worker.messages) == depth
        sim.run_until_idle()
        assert sim.tokens["a"] == reference_output(range(4), 6)


def test_long_prompt_is_cut_at_page_borders_and_decodes_go_on_beside_it():
    sim = SimInstance(make_options(chunked_prefill_size=8, max_total_tokens=512))
    sim.submit("short", range(3), max_new_tokens=40)
    for _ in range(6):
        sim.plan()
        sim.work()
    before = len(sim.tokens["short"])
    sim.submit("long", range(100, 150), max_new_tokens=2)
    chunks = []
    while "long" not in sim.tokens:
        sim.plan()
        step = sim.to_worker.messages[-1]
        chunks.append(step)
        sim.work()
    assert len(sim.tokens["short"]) > before + 3
    sim.run_until_idle()
    assert sim.tokens["long"] == reference_output(range(100, 150), 2)
    assert_all_returned(sim)


@pytest.mark.parametrize(("mixed", "lengths"), [(4, [4, 4, 4]), (3, [3, 3, 3]), (1, [1, 1, 1])])
def test_pieces_beside_decodes_may_be_shorter_than_a_page(mixed: int, lengths: list[int]):
    sim = SimInstance(make_options(mixed_chunk_size=mixed, max_total_tokens=512))
    sim.submit("short", range(3), max_new_tokens=80)
    while "short" not in sim.tokens:
        sim.plan()
        sim.work()
    sim.submit("long", range(100, 130), max_new_tokens=2)
    pieces: dict[int, list[int]] = {}
    while len(pieces) < len(lengths):
        sim.plan()
        for step in sim.to_worker.messages:
            of_prompts = unpack_i32(step.q_lens)[unpack_i32(step.use_last) == 0]
            if of_prompts.size:
                pieces[step.step_id] = of_prompts.tolist()
        sim.work()
    assert list(pieces.values())[:3] == [[n] for n in lengths]
    sim.run_until_idle()
    assert sim.tokens["long"] == reference_output(range(100, 130), 2)
    assert_all_returned(sim)


def test_who_comes_behind_a_batch_does_not_wait_for_all_of_it():
    sim = SimInstance(make_options(max_running_requests=2))
    for place in range(20):
        sim.submit(f"batch-{place}", range(place, place + 9), max_new_tokens=3, place=place)
    sim.submit("chat", range(3), max_new_tokens=3)
    sim.run_until_idle()
    order = list(sim.ends)
    assert order.index("chat") < 3
    assert [rid for rid in order if rid != "chat"] == [f"batch-{place}" for place in range(20)]


def test_the_last_of_a_batch_is_not_overtaken_for_ever():
    sim = SimInstance()
    sim.submit("batch", range(9), place=1_000_000)
    assert sim.scheduler.reqs["batch"].times.fcfs_time == MAX_BATCH_SECONDS


def test_small_pool_retracts_and_still_answers_everything():
    sim = SimInstance(make_options(max_total_tokens=64, schedule_conservativeness=0.01))
    prompts = {f"r{i}": [i, i + 1, i + 2, 7] for i in range(6)}
    for rid, prompt in prompts.items():
        sim.submit(rid, prompt, max_new_tokens=30)
    sim.run_until_idle()
    assert sim.scheduler.planner.retraction.count > 0
    for rid, prompt in prompts.items():
        assert sim.tokens[rid] == reference_output(prompt, 30)
        assert end_of(sim, rid).finish.type is FinishType.LENGTH
    assert_all_returned(sim)


def test_memory_of_a_request_whose_time_is_over_is_noticed_once():
    sim = SimInstance()
    message = msgspec.structs.replace(make_generate("a", [1] * 20, max_new_tokens=100), timeout_s=5.0, arrival=sim.now)
    sim.scheduler.arrivals.admit(message, sim.now)
    noticed = []
    for seconds in (0.0, 0.0, 6.0, 0.0):
        sim.now += seconds
        sim.plan()
        noticed.append(sim.scheduler.has_freed)
        sim.work()
    assert "a" in sim.ends
    assert noticed == [False, False, True, False]


def test_prompt_larger_than_the_pool_is_refused_by_name():
    sim = SimInstance()
    sim.submit("a", range(300))
    sim.plan()
    end = sim.ends["a"]
    assert isinstance(end, ReqError)
    assert end.status == 400
    assert "300" in end.message
    assert "--max-total-tokens" in end.message


def test_output_is_clamped_to_what_the_pool_can_hold():
    sim = SimInstance(make_options(max_total_tokens=32))
    sim.submit("a", range(10), max_new_tokens=400)
    sim.run_until_idle()
    assert sim.tokens["a"] == reference_output(range(10), 22)
    assert_all_returned(sim)


def test_full_queue_answers_429_and_draining_503():
    sim = SimInstance(make_options(max_queued_requests=1, max_running_requests=1))
    for rid in "abc":
        sim.submit(rid, range(4))
    sim.scheduler.draining = True
    sim.submit("d", range(4))
    sim.run_until_idle()
    assert sim.ends["c"].status == 429
    assert sim.ends["d"].status == 503
    assert sim.tokens["a"] == sim.tokens["b"] == reference_output(range(4), 8)


def test_live_rid_can_not_be_taken_twice_but_reused_later():
    sim = SimInstance()
    sim.submit("a", range(4))
    sim.plan()
    sim.scheduler.arrivals.admit(make_generate("a", range(9)), sim.now)
    sim.outbox.flush()
    error = next(m for m in sim.to_detokenizer.messages if isinstance(m, ReqError))
    assert error.status == 400
    assert error.field == "rid"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_abort_at_any_moment_gives_everything_back(turns):
    sim = SimInstance()
    sim.submit("a", range(40), max_new_tokens=50)
    sim.submit("b", range(40), max_new_tokens=10)
    for _ in range(turns):
        sim.plan()
        sim.work()
    sim.scheduler.abort(AbortReq("a"))
    sim.run_until_idle()
    assert end_of(sim, "a").finish.type is FinishType.ABORT
    assert sim.tokens["b"] == reference_output(range(40), 10)
    assert_all_returned(sim)


def test_abort_all_and_unknown_rids_and_stop():
    sim = SimInstance()
    for rid in "abc":
        sim.submit(rid, range(6), max_new_tokens=50)
    for _ in range(3):
        sim.plan()
        sim.work()
    sim.scheduler.abort(AbortReq("nobody"))
    sim.scheduler.stop(StopReq("a"))
    sim.scheduler.abort(AbortReq(""))
    sim.run_until_idle()
    assert "a" not in sim.ends  # the detokenizer has told its client
    assert {end_of(sim, r).finish.type for r in "bc"} == {FinishType.ABORT}
    assert_all_returned(sim)


def test_logits_that_are_not_finite_fail_the_request_and_what_it_cached_is_not_found():
    sim = SimInstance()
    sim.submit("a", range(12), max_new_tokens=4)
    sim.plan()
    step = sim.to_worker.messages.popleft()
    sim.to_worker.messages.clear()
    sim.scheduler.on_step_result(StepResult(step.step_id, pack_i32([0]), 0.1, bad_entries=[0]), sim.now)
    sim.scheduler.on_step_result(StepResult(step.step_id + 1, pack_i32([0]), 0.1), sim.now)
    sim.outbox.flush()
    sim.plan()
    assert sim.ends["a"].status == 500
    assert sim.scheduler.memory.pool.usage()["free"] == sim.scheduler.memory.pool.max_total_tokens
    assert_all_returned(sim)


def test_bad_logits_of_a_request_that_has_ended_meanwhile_are_not_cached_either():
    sim = SimInstance()
    sim.submit("a", range(12), max_new_tokens=4)
    sim.plan()
    sim.scheduler.abort(AbortReq("a"))
    assert sim.scheduler.memory.pool.usage()["cached"] > 0
    step = sim.to_worker.messages.popleft()
    sim.to_worker.messages.clear()
    sim.scheduler.on_step_result(StepResult(step.step_id, pack_i32([0]), 0.1, bad_entries=[0]), sim.now)
    assert sim.scheduler.memory.pool.usage()["cached"] == 0
    sim.scheduler.check_invariants()


def test_logprob_start_limits_the_reuse_of_cached_tokens():
    sim = SimInstance()
    sim.submit("a", range(12), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("b", range(12), max_new_tokens=1, logprobs=(6, 0))
    sim.plan()
    step = sim.to_worker.messages[0]
    spec = step.input_logprobs[0]
    assert (spec.first, spec.targets) == (1, pack_i32(range(6, 12)))  # 4 cached, position 5 scores token 6


def test_the_prompt_is_reported_once_where_it_is_wanted():
    sim = SimInstance()
    sim.submit("quiet", range(12), max_new_tokens=3)
    sim.submit("described", range(12), max_new_tokens=3, return_prompt=True)
    sim.submit("scored", range(12), max_new_tokens=3, logprobs=(10, 0))
    sim.run_until_idle()
    reports = {rid: [item.prompt for item in items if item.prompt is not None] for rid, items in sim.items.items()}
    assert reports["quiet"] == []
    [described], [scored] = reports["described"], reports["scored"]
    assert (described.token_ids, described.logprobs) == (pack_i32(range(12)), None)
    assert (scored.token_ids, [entry.token_id for entry in scored.logprobs]) == (b"", [10, 11])


def test_lpm_prefers_what_is_cached():
    sim = SimInstance(make_options(schedule_policy="lpm", max_running_requests=1))
    sim.submit("warm", range(16), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("cold", range(50, 66), max_new_tokens=1)
    sim.submit("hot", range(16), max_new_tokens=1)
    sim.run_until_idle()
    assert list(sim.ends) == ["warm", "hot", "cold"]


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pool=st.sampled_from([48, 96, 256]),
    chunk=st.sampled_from([4, 16, -1]),
    mixed=st.sampled_from([None, 1, 3, 4]),
    radix=st.booleans(),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm"]),
    interval=st.sampled_from([1, 3, 32]),
    window=st.sampled_from([SimWindow(), SimWindow(1, 8), SimWindow(6, 12), SimWindow(6, 40), SimWindow(13, 32)]),
)
def test_random_load(seed, pool, chunk, mixed, radix, overlap, policy, interval, window):
    rng = random.Random(seed)
    options = make_options(
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
        mixed_chunk_size=None if chunk == -1 else mixed,
        disable_radix_cache=not radix,
        disable_overlap_schedule=not overlap,
        schedule_policy=policy,
        schedule_conservativeness=rng.choice([0.01, 1.0]),
        stream_interval=interval,
    )
    sim = SimInstance(options, window=window)
    expected, cut = {}, set()
    for i in range(30):
        rid = f"r{i}"
        base = rng.choice([[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 9], []])
        prompt = base + [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
        budget = rng.randrange(1, 12)
        stops = [rng.randrange(97) for _ in range(rng.choice([0, 0, 20]))]
        sim.submit(rid, prompt, max_new_tokens=budget, stop_ids=stops, stream=rng.random() < 0.7)
        expected[rid] = reference_output(prompt, min(budget, pool - len(prompt)), stops)
        for _ in range(rng.randrange(4)):
            sim.plan()
            sim.scheduler.check_invariants()
            sim.work()
        if rng.random() < 0.2:
            victim = rng.choice(list(expected))
            cut.add(victim)
            sim.scheduler.abort(AbortReq(victim))
    sim.run_until_idle()
    for rid, tokens in expected.items():
        got = sim.tokens.get(rid, [])
        if rid in cut:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
            assert end_of(sim, rid).finish.type in (FinishType.LENGTH, FinishType.STOP)
        assert end_of(sim, rid).meta.completion_tokens == len(got)
    assert_all_returned(sim)


def test_scheduler_process_imports_no_torch():
    code = "import sys, pdserve.scheduler.process; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=limit(60))
    assert out.stdout.strip() == "[]"


def test_several_answers_compute_their_prompt_once():
    sim = SimInstance(make_options(chunked_prefill_size=8, max_total_tokens=512))
    for i in range(4):
        sim.submit(f"a-{i}", range(50), max_new_tokens=6, fork_of="a-0" if i else "")
    sim.run_until_idle()
    expected = reference_output(range(50), 6)
    assert all(sim.tokens[f"a-{i}"] == expected for i in range(4))
    assert [end_of(sim, f"a-{i}").meta.cached_tokens for i in range(4)] == [0, 48, 48, 48]
    # All of it once, and what is behind the last whole page for each of the others.
    assert sim.scheduler.counters.prompt_tokens == 50 + 3 * 2
    assert_all_returned(sim)


@pytest.mark.parametrize("when", [0, 3, 12])
def test_forks_go_on_when_the_first_is_aborted(when: int):
    sim = SimInstance(make_options(chunked_prefill_size=8, max_total_tokens=512))
    for i in range(3):
        sim.submit(f"a-{i}", range(50), max_new_tokens=30, fork_of="a-0" if i else "")
    for _ in range(when):
        sim.plan()
        sim.work()
    sim.scheduler.abort(AbortReq("a-0"))
    sim.scheduler.abort(AbortReq("a-1"))
    sim.run_until_idle()
    assert sim.tokens["a-2"] == reference_output(range(50), 30)
    assert end_of(sim, "a-1").finish.type is FinishType.ABORT
    assert_all_returned(sim)


def test_a_fork_of_one_that_is_over_begins_at_once():
    sim = SimInstance()
    sim.submit("a-1", range(10), max_new_tokens=3, fork_of="a-0")
    sim.run_until_idle()
    assert sim.tokens["a-1"] == reference_output(range(10), 3)


@pytest.mark.parametrize("when", ["before the fork", "meanwhile"])
def test_a_fork_does_not_wait_for_one_that_was_retracted(when: str) -> None:
    """It may wait for memory for long, and has to compute its prompt again itself."""
    first, fork = (
        Req.create(make_generate(rid, range(9), fork_of=of), Route.LOCAL, ReqState.WAITING, 8, 1)
        for rid, of in (("first", ""), ("fork", "first"))
    )
    forks, given = Forks({"first": first, "fork": fork}), []
    if when == "before the fork":
        first.retractions = 1
        assert not forks.add(fork)
        return
    assert forks.add(fork)
    forks.release(given.append)
    assert given == []
    first.retractions = 1
    forks.release(given.append)
    assert given == [fork]


def test_a_fork_that_is_held_back_is_not_given_on_by_the_one_that_it_waits_for():
    sim = SimInstance(make_options(chunked_prefill_size=8, max_total_tokens=512))
    for i in range(2):
        sim.submit(f"a-{i}", range(50), max_new_tokens=6, fork_of="a-0" if i else "")
    fork = sim.scheduler.reqs["a-1"]
    sim.plan()
    sim.scheduler.peer_requests.hold_back(fork)
    while "a-0" not in sim.ends:
        sim.plan()
        sim.work()
    assert "a-1" not in sim.tokens
    sim.scheduler.peer_requests.go_on(fork)
    sim.run_until_idle()
    assert sim.tokens["a-1"] == reference_output(range(50), 6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ends", ["by length", "by a stop token"])
def test_forks_of_one_that_ends_with_its_first_token_begin_together(ends: str, overlap: bool) -> None:
    options = {"chunked_prefill_size": 64, "max_total_tokens": 1024, "max_running_requests": 32}
    sim = SimInstance(make_options(**options, disable_overlap_schedule=not overlap))
    [token] = reference_output(range(50), 1)
    fields = {"max_new_tokens": 1} if ends == "by length" else {"max_new_tokens": 8, "stop_ids": (token,)}
    for i in range(16):
        sim.submit(f"a-{i}", range(50), fork_of="a-0" if i else "", **fields)
    steps = 0
    while not sim.scheduler.is_idle:
        sim.plan()
        steps += sim.work()
    # With overlap, a step is planned before the stop token is known.
    assert steps <= 2 + (1 + overlap if ends == "by a stop token" else 0)
    assert all(sim.tokens[f"a-{i}"] == [token] for i in range(16))
    assert sim.scheduler.counters.prompt_tokens == 50 + 15 * 2
    assert_all_returned(sim)


def waiting_forks() -> tuple[list[Req], dict[str, Req], Forks]:
    """Return a request with two forks that wait for it, the requests that live by rid, and the owner of the forks."""
    reqs = [
        Req.create(make_generate(f"a-{i}", range(9), fork_of="a-0" if i else ""), Route.LOCAL, ReqState.WAITING, 8, 1)
        for i in range(3)
    ]
    living = {req.rid: req for req in reqs}
    forks = Forks(living)
    assert all(map(forks.add, reqs[1:]))
    return reqs, living, forks


def test_forks_of_one_that_failed_compute_the_prompt_one_after_the_other() -> None:
    """What it computed is not cached. Of the others, each may be the first that does not fail."""
    reqs, living, forks = waiting_forks()
    given: list[Req] = []
    reqs[0].state, reqs[0].computed = ReqState.FAILED, 9
    del living["a-0"]
    forks.release(given.append)
    assert given == reqs[1:2]
    forks.release(given.append)
    assert given == reqs[1:2]
    reqs[1].state = ReqState.RUNNING
    forks.release(given.append)
    assert given == reqs[1:]


def test_forks_of_an_incoming_request_that_has_ended_do_not_wait_for_its_kv() -> None:
    """Its first token came ahead of its KV, and ended it."""
    reqs, living, forks = waiting_forks()
    given: list[Req] = []
    reqs[0].route, reqs[0].state, reqs[0].computed = Route.INCOMING, ReqState.FINISHED, 9
    del living["a-0"]
    forks.release(given.append)
    assert given == reqs[1:2]


def test_kv_that_comes_back_and_is_longer_than_the_context_is_refused() -> None:
    """Prefill and decode may have unlike ``--context-length``."""
    sim = SimInstance(make_options(max_total_tokens=512, handover="on"), context_length=64)
    refusal = sim.scheduler.arrivals.admit_kv_return(make_generate("longer", list(range(65))))
    assert isinstance(refusal, str)
    assert "holds at most 64" in refusal
    assert not sim.scheduler.reqs
    fits = sim.scheduler.arrivals.admit_kv_return(make_generate("fits", list(range(64))))
    assert isinstance(fits, Req)
    planner = sim.scheduler.planner
    planner.claims.add_incoming(fits, 64, optional=True)
    assert planner.grant_incoming(0.0) == [fits]
