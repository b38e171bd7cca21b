"""The hand-over between two schedulers gives the tokens of one instance, whatever the order of events."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.sim import NO_WINDOW, SimWindow, make_generate, reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, run_until_idle, until_delivered

from pdserve.messages.base import unpack_i32
from pdserve.messages.outputs import FinishType
from pdserve.messages.requests import AbortReq
from pdserve.messages.worker import ForwardStep, StepResult


def test_one_request_goes_through_with_the_tokens_of_one_instance():
    pair = SimPair()
    pair.submit("a", range(30), 7, max_new_tokens=6)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 6)
    assert pair.prefill.tokens["a"] == reference_output(range(30), 1)
    timing = pair.decode.ends["a"].meta.timing
    assert timing.transfer_bytes == 8 * 4 * 8  # eight pages of four 8-byte slots
    assert_all_returned(pair)


def test_decode_keeps_its_own_prefix_and_asks_only_for_the_rest():
    pair = SimPair()
    pair.submit("a", range(30), 1, max_new_tokens=4)
    run_until_idle(pair)
    pair.submit("b", [*range(20), 9, 9, 9, 9, 9], 2, max_new_tokens=4)
    run_until_idle(pair)
    end = pair.decode.ends["b"]
    assert pair.decode.tokens["b"] == reference_output([*range(20), 9, 9, 9, 9, 9], 4)
    assert end.meta.timing.transfer_bytes == 8 * 4 * 2
    assert end.meta.cached_tokens == 20
    assert_all_returned(pair)


def test_either_leg_may_come_first():
    rng = random.Random(1)
    for first, second in (("prefill", "decode"), ("decode", "prefill")):
        pair = SimPair()
        pair.submit("a", range(9), 1, legs=(first,), max_new_tokens=3)
        for _ in range(50):
            rng.choice(pair.moves())()
        pair.submit("a", range(9), 1, legs=(second,), max_new_tokens=3)
        run_until_idle(pair)
        assert pair.decode.tokens["a"] == reference_output(range(9), 3)


def test_one_token_or_a_stop_token_ends_right_after_landing():
    pair = SimPair()
    prompt = [5, 6, 7]
    first = reference_output(prompt, 1)[0]
    pair.submit("a", prompt, 1, max_new_tokens=1)
    pair.submit("b", prompt, 2, max_new_tokens=9, stop_ids=[first])
    run_until_idle(pair)
    assert pair.decode.ends["a"].finish.type is FinishType.LENGTH
    assert pair.decode.ends["b"].finish.matched == first
    assert_all_returned(pair)


def test_corrupt_pages_are_never_decoded(caplog):
    """The first token was right, and the others come from what is computed here."""
    pair = SimPair()
    pair.corrupt = True
    pair.submit("a", range(30), 1, max_new_tokens=4)
    with caplog.at_level("INFO"):
        run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(30), 4)
    assert pair.decode.receivers.recomputed == 1
    assert "checksum" in caplog.text
    pair.decode.scheduler.memory.flush()
    pair.corrupt = False
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)
    assert pair.decode.ends["b"].meta.timing.transfer_bytes == 8 * 4 * 8  # nothing of the bad pages was cached
    assert_all_returned(pair)


def test_a_bad_prefix_is_not_cached_after_its_room_has_drained():
    pair, rng = SimPair(chunked_prefill_size=8), random.Random(3)
    pair.submit("a", range(30), 1, max_new_tokens=4)
    while not pair.pushes:
        rng.choice(pair.moves())()
    run, worker = pair.prefill.worker.run, pair.prefill.worker

    def bad(step: ForwardStep) -> StepResult:
        worker.run = run
        result = run(step)
        result.bad_entries = [0]
        return result

    worker.run = bad
    while "a" not in pair.prefill.ends:
        pair.prefill.plan()
        pair.prefill.work()
    assert pair.prefill.ends["a"].status == 500
    assert pair.pushes, "the room still pushes when its request has failed"
    run_until_idle(pair)
    assert pair.prefill.scheduler.memory.pool.usage()["cached"] == 0
    pair.submit("b", range(30), 2, max_new_tokens=4)
    run_until_idle(pair)
    assert pair.prefill.scheduler.planner.cached_tokens == 0
    assert pair.decode.tokens["b"] == reference_output(range(30), 4)
    assert_all_returned(pair)


def test_history_for_penalties_begins_with_the_token_that_came_from_the_prefill():
    pair = SimPair()
    pair.submit("a", range(10), 1, max_new_tokens=3, repetition_penalty=1.5)
    rng = random.Random(5)
    steps = []
    while not steps:
        rng.choice(pair.moves())()
        steps = [m for m in pair.decode.to_worker.messages if isinstance(m, ForwardStep)]
    [row] = steps[0].new_rows
    assert unpack_i32(row.history).tolist() == [*range(10), *reference_output(range(10), 1)]
    assert row.prompt_len == 10


def test_time_in_the_prefills_queue_is_not_time_of_the_transfer():
    pair = SimPair(max_total_tokens=64, disable_radix_cache=True)
    pair.prefill.submit("old", range(40), max_new_tokens=400)
    pair.prefill.plan()
    pair.submit("a", range(40), 1, max_new_tokens=4)
    for _ in range(3):
        until_delivered(pair)
    pair.now += LIMITS.queue - 1
    pair.advance()
    pair.prefill.scheduler.abort(AbortReq("old"))
    for _ in range(6):
        pair.prefill.plan()
        pair.prefill.work()
    assert pair.pushes
    pair.now += LIMITS.transfer - 1  # in all more than the queue may take
    pair.advance()
    assert pair.prefill.senders.rooms[1].failure is None
    pair.now += 1.1
    pair.advance()
    assert "no progress" in pair.prefill.senders.rooms[1].failure[1]
    run_until_idle(pair)
    assert_all_returned(pair)


def test_kv_of_an_unconfirmed_source_is_for_its_own_requests_only():
    pair = SimPair()
    pair.submit("a", range(33), 1, max_new_tokens=4)
    run_until_idle(pair)
    memory = pair.decode.scheduler.memory
    for rid, trusted, host, expected in (("b", False, "elsewhere", 0), ("c", True, "p", 0), ("d", False, "p", 32)):
        msg = make_generate(rid, range(33), max_new_tokens=4, room=9)
        where = msgspec.structs.replace(msg.bootstrap, host=host, trusted=trusted)
        pair.decode.scheduler.arrivals.admit(msgspec.structs.replace(msg, bootstrap=where), pair.now)
        assert memory.prefix_len(pair.decode.scheduler.reqs[rid]) == expected, rid
        pair.decode.scheduler.abort(AbortReq(rid))


def test_open_handovers_are_reported_with_their_state():
    pair, rng = SimPair(), random.Random(1)
    seen = {"sending": [], "receiving": []}

    def look():
        for room in pair.prefill.senders.info(pair.now) + pair.decode.receivers.info(pair.now):
            states = seen[room["direction"]]
            if not states or states[-1] != room["state"]:
                states.append(room["state"])
            assert (room["room"], room["seconds"] >= 0) == (7, True)
        return seen

    pair.prefill.submit("busy", range(50, 60), max_new_tokens=100)
    pair.submit("a", range(30), 7, legs=("prefill",), max_new_tokens=2)
    look()
    pair.submit("a", range(30), 7, legs=("decode",), max_new_tokens=2)
    while not pair.pushes:
        look()
        rng.choice(pair.moves())()
    look()
    (room,) = pair.decode.receivers.info(pair.now)
    assert (room["rid"], room["peer"], room["prompt_tokens"], room["reason"]) == ("a", "prefill", 30, None)
    pair.prefill.scheduler.abort(AbortReq("a"))
    look()
    run_until_idle(pair)
    look()
    assert seen["sending"] == ["bootstrapping", "queued", "pushing", "draining"]
    assert seen["receiving"][:2] == ["linking", "transferring"]  # it found memory in the same turn
    assert pair.prefill.senders.info(pair.now) == pair.decode.receivers.info(pair.now) == []


@settings(max_examples=examples(16), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pool=st.sampled_from([64, 128, 256]),
    chunk=st.sampled_from([4, 16, -1]),
    radix=st.booleans(),
    faults=st.booleans(),
    interval=st.sampled_from([1, 3, 32]),
    window=st.sampled_from([NO_WINDOW, SimWindow(6, 32), SimWindow(13, 64)]),
)
def test_random_handovers(seed, pool, chunk, radix, faults, interval, window):
    rng = random.Random(seed)
    # A prompt that is not cut needs all of its window pages at once.
    pair = SimPair(
        NO_WINDOW if chunk == -1 else window,
        max_total_tokens=pool,
        chunked_prefill_size=chunk,
        disable_radix_cache=not radix,
        schedule_conservativeness=0.05,
        stream_interval=interval,
    )
    expected, cut = {}, set()
    for i in range(12):
        rid = f"r{i}"
        base = rng.choice([[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 9], []])
        prompt = base + [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
        budget = rng.randrange(1, 12)
        pair.submit(rid, prompt, 100 + i, max_new_tokens=budget, stream=rng.random() < 0.7)
        expected[rid] = reference_output(prompt, budget)
        for _ in range(rng.randrange(12)):
            rng.choice(pair.moves())()
        pair.check()
        if rng.random() < 0.25:
            victim = rng.choice(list(expected))
            cut.add(victim)
            getattr(pair, rng.choice(["prefill", "decode"])).scheduler.abort(AbortReq(victim))
            pair.collect()
        if faults and rng.random() < 0.08:
            cut.update(expected)
            pair.lose_link()
            for _ in range(rng.randrange(6)):  # pages still on their way land in pages that are not free yet
                copies = [m for m in pair.moves() if "lambda" in str(m)]
                if copies:
                    rng.choice(copies)()
                pair.decode.plan()
                pair.decode.work()
            pair.link_is_down()
    run_until_idle(pair, rng)
    for rid, tokens in expected.items():
        got = pair.decode.tokens.get(rid, [])
        assert got == tokens[: len(got)]
        if rid not in cut:
            assert got == tokens
    assert pair.decode.ends.keys() == pair.prefill.ends.keys() == expected.keys()
    assert_all_returned(pair)


def test_several_answers_are_one_hand_over():
    pair = SimPair()
    for i in range(4):
        pair.submit(f"a-{i}", range(30), 7 + i, max_new_tokens=6, fork_of="a-0" if i else "")
    run_until_idle(pair, random.Random(3))
    expected = reference_output(range(30), 6)
    assert all(pair.decode.tokens[f"a-{i}"] == expected for i in range(4))
    assert pair.decode.receivers.done == pair.prefill.senders.pushes.done == 1
    assert pair.prefill.scheduler.counters.prompt_tokens == 30
    assert pair.decode.scheduler.counters.prompt_tokens == 3 * 2  # behind the last whole page
    assert_all_returned(pair)


def test_where_the_one_hand_over_fails_the_other_answers_are_computed_here():
    pair = SimPair()
    pair.corrupt = True
    for i in range(3):
        pair.submit(f"a-{i}", range(30), 7 + i, max_new_tokens=6, fork_of="a-0" if i else "")
    run_until_idle(pair, random.Random(4))
    assert all(pair.decode.tokens[f"a-{i}"] == reference_output(range(30), 6) for i in range(3))
    assert_all_returned(pair)
