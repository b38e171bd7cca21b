"""A pool that shrinks and grows while it is used: tokens stay right, counts stay whole, and no request loses pages."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from support.sim import NO_WINDOW, SimWindow, make_generate, make_options, reference_output
from support.sim_resize import FREED, ResizedSim, ResizedTieredSim

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.mem_cache.window_pages import WindowPages, WindowSpan
from pdserve.messages.memory import MemoryReq, MemoryResult, ResizeReq, ResizeResult, TrimPool
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.requests import AbortReq
from pdserve.runtime.machine.memory import Memory
from pdserve.scheduler.features.memory_saver import MemorySaver, MemoryState
from pdserve.scheduler.handover import NoHandovers
from pdserve.scheduler.req import Req, ReqState, Route

PAGE = 4


def test_pages_beyond_the_end_are_never_handed_out() -> None:
    allocator = PagedTokenToKVPoolAllocator(8 * PAGE, PAGE)
    taken = allocator.alloc_extend(0, 5 * PAGE, 0)
    assert taken is not None
    allocator.resize(3)
    allocator.check_invariants()
    # Two of five are beyond; with three within, two too many are in use.
    assert (allocator.beyond, allocator.available_size()) == (2, -2 * PAGE)
    # A request that has a page may fill it.
    assert allocator.alloc_extend(2, PAGE, int(taken[1])) is not None
    assert allocator.alloc_extend(0, 1, 0) is None
    allocator.free(taken[: 2 * PAGE])
    allocator.check_invariants()
    assert (allocator.beyond, allocator.available_size()) == (2, 0)
    assert allocator.alloc_extend(0, 1, 0) is None
    allocator.free(taken[4 * PAGE :])
    assert (allocator.beyond, allocator.available_size()) == (1, PAGE)
    again = allocator.alloc_extend(0, PAGE, 0)
    assert again is not None
    assert again[0] // PAGE <= 3
    allocator.free(np.concatenate((again, taken[2 * PAGE : 4 * PAGE])))
    allocator.check_invariants()
    assert (allocator.beyond, sorted(allocator.free_pages())) == (0, [1, 2, 3])
    with pytest.raises(ValueError, match="can't be one of 9"):
        allocator.resize(9)
    allocator.resize(8)
    allocator.check_invariants()
    # What is new goes out last: its memory was given back.
    again = allocator.alloc_extend(0, 3 * PAGE, 0)
    assert again is not None
    assert sorted(set((again // PAGE).tolist())) == [1, 2, 3]


def test_window_pages_beyond_the_end_go_when_no_span_has_them() -> None:
    windows = WindowPages(window=5, num_slots=12 * PAGE, num_full_pages=24, page_size=PAGE)
    spans = [WindowSpan() for _ in range(4)]
    for i, span in enumerate(spans):
        windows.promise(span, 100)
        windows._extend(span, np.array([3 * i + 1, 3 * i + 2], dtype=np.int32))
    assert windows.committed > windows.pages_for(8)  # four requests were promised two each
    windows.end(spans[0], np.arange(PAGE, 3 * PAGE, dtype=np.int32))
    assert windows.committed <= windows.pages_for(12)
    windows.resize(12)
    assert (windows.num_pages, windows.beyond, windows.usage()["window_free"]) == (6, 2, 0)
    # The last one's pages are gone with it, idle or not; those of the first, which are idle, are for the next one.
    windows._leave(spans[3], np.array([10, 11], dtype=np.int32))
    assert (windows.beyond, windows.page_of[[10, 11]].tolist(), windows.accounts().idle) == (0, [0, 0], [1, 2])
    windows.resize(24)
    assert (windows.num_pages, sorted(windows.accounts().free)) == (12, [7, 8, 9, 10, 11, 12])


@pytest.mark.parametrize("make", [ResizedSim, ResizedTieredSim])
def test_what_is_cached_is_evicted_and_nothing_else_is_lost(make: Any) -> None:
    sim = make(64, store=False, hicache_write_policy="write_back") if make is ResizedTieredSim else make(make_options())
    settle = sim.settle if make is ResizedTieredSim else sim.run_until_idle
    for i in range(3):
        sim.submit(f"r{i}", range(100 * i, 100 * i + 60), max_new_tokens=4)
    settle()
    assert sim.scheduler.memory.pool.usage()["cached"] > 64
    assert sim.order(67) == ResizeResult(64, 256, FREED, id=3)
    sim.scheduler.check_invariants()
    usage = sim.scheduler.memory.pool.usage()
    assert usage["total"] == usage["free"] + usage["cached"] == 64
    assert usage["most"] == 256
    sim.submit("long", range(80), max_new_tokens=1)
    sim.submit("fits", range(50), max_new_tokens=9)
    settle()
    assert sim.tokens["fits"] == reference_output(range(50), 9)
    assert sim.ends["long"].status == 400
    assert sim.order(256) == ResizeResult(256, 64, FREED, id=3)
    sim.submit("again", range(80), max_new_tokens=5)
    settle()
    assert sim.tokens["again"] == reference_output(range(80), 5)
    # What the host had saved of evicted pages is right, and was saved before they went.
    for i in range(3):
        sim.submit(f"s{i}", range(100 * i, 100 * i + 60), max_new_tokens=4)
        settle()
        assert sim.tokens[f"s{i}"] == reference_output(range(100 * i, 100 * i + 60), 4)
    assert make is ResizedSim or all(sim.ends[f"s{i}"].meta.cached_tokens == 56 for i in range(3))


def test_what_is_cached_within_the_new_end_stays() -> None:
    sim = ResizedSim(make_options())
    sim.submit("within", range(100, 140), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("beyond", range(200), max_new_tokens=1)
    sim.run_until_idle()
    assert sim.order(100) == ResizeResult(100, 256, FREED, id=3)
    assert sim.scheduler.memory.pool.usage()["cached"] == 100
    sim.submit("again", range(100, 140), max_new_tokens=1)
    sim.run_until_idle()
    assert sim.ends["again"].meta.cached_tokens == 36  # type: ignore[union-attr]


def test_requests_keep_their_pages_and_what_they_were_promised() -> None:
    sim = ResizedSim(make_options())
    sim.submit("a", range(40), max_new_tokens=60)
    sim.plan()
    refused = sim.order(64)
    assert refused is not None
    assert (refused.status, sim.scheduler.memory.pool.max_total_tokens) == (409, 256)
    assert "may become 100 tokens long" in refused.text
    assert sim.order(64, wait_s=30.0) is None
    busy = sim.order(128)
    assert busy is not None
    assert busy.status == 409
    result = None
    while result is None:
        sim.plan()
        sim.work()
        result = sim.resize_answer()
    assert (type(result), result.max_total_tokens) == (ResizeResult, 64)
    assert sim.tokens["a"] == reference_output(range(40), 60)
    # Or it goes on as it is when the time is up.
    sim.order(256)
    sim.submit("b", range(40), max_new_tokens=60)
    sim.plan()
    sim.order(64, wait_s=0.5)
    assert sim.resize.seconds_left(sim.now) == pytest.approx(0.5)
    sim.now += 0.5
    sim.resize.tick(sim.now)
    late = sim.resize_answer()
    assert late is not None
    assert (late.status, sim.scheduler.memory.pool.max_total_tokens) == (409, 256)
    sim.run_until_idle()
    assert sim.tokens["b"] == reference_output(range(40), 60)


AT_THE_END = "requests use pages at the pool's end; try again later, or give it time (wait_s)"


def busy(sim: ResizedSim) -> None:
    """Start a request at the pool's end, which others are about to share: all of it is in use."""
    sim.submit("first", range(100, 220), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("end", range(80), max_new_tokens=30)
    for _ in range(12):
        sim.plan()
        sim.work()


def test_the_end_empties_however_many_requests_come() -> None:
    """Each of them shares a prompt that lies there, and is there when the one before it ends."""
    sim = ResizedSim(make_options())
    busy(sim)
    assert sim.scheduler.memory.pool.end.is_held_behind(120)
    assert sim.order(120) == RefusedAnswer(409, AT_THE_END, id=3)
    assert sim.order(120, wait_s=1e6) is None
    assert sim.scheduler.memory.pool.end.beyond > 0
    result, count = None, 0
    while result is None:
        if len(sim.scheduler.reqs) < 2:
            sim.submit(f"r{count}", range(80), max_new_tokens=20)
            count += 1
        sim.plan()
        sim.work()
        sim.scheduler.check_invariants()
        result = sim.resize_answer()
        assert count < 20
    assert (type(result), result.max_total_tokens) == (ResizeResult, 120)
    sim.run_until_idle()
    assert sim.tokens["end"] == reference_output(range(80), 30)
    assert all(sim.tokens[f"r{i}"] == reference_output(range(80), 20) for i in range(count))


def test_answers_that_may_become_long_are_not_waited_for_for_ever() -> None:
    """There is always one of them.

    A request that comes after the order may become as long as the new pool allows, or ends when there is one.
    """
    sim = ResizedSim(make_options())
    sim.submit("before", range(20), max_new_tokens=150)
    sim.plan()
    assert sim.order(122, wait_s=1e6) is None
    result, count = None, 0
    while result is None:
        if len(sim.scheduler.reqs) < 2:
            sim.submit(f"r{count}", range(20), max_new_tokens=150)
            count += 1
        sim.plan()
        sim.work()
        result = sim.resize_answer()
        assert count < 9
    assert (type(result), result.max_total_tokens) == (ResizeResult, 120)
    sim.run_until_idle()
    assert sim.tokens["before"] == reference_output(range(20), 150)
    assert [len(sim.tokens[f"r{i}"]) for i in range(count)] == [len(sim.tokens["r0"]), *[98] * (count - 1)]
    assert sim.tokens["r0"] == reference_output(range(20), len(sim.tokens["r0"]))
    assert 98 <= len(sim.tokens["r0"]) < 150
    # A prompt that is too long for the new pool has all of the present one.
    sim.submit("long", range(100), max_new_tokens=150)
    sim.plan()
    assert sim.order(64, wait_s=1e6) is None
    sim.submit("meanwhile", range(70), max_new_tokens=30)
    sim.run_until_idle()
    assert sim.tokens["meanwhile"] == reference_output(range(70), 30)


def test_windows_that_are_promised_to_others_all_the_time_are_not_waited_for_for_ever() -> None:
    sim = ResizedSim(make_options(), window=SimWindow(9, 120))
    result, count = None, 0

    def turn() -> None:
        nonlocal count
        if len(sim.scheduler.reqs) < 7:
            sim.submit(f"r{count}", range(count, count + 12), max_new_tokens=14)
            count += 1
        sim.plan()
        sim.work()
        sim.scheduler.check_invariants()

    while count < 10:  # they end as they came: one by one
        turn()
    assert sim.order(128, wait_s=1e6) is None
    while result is None:
        turn()
        result = sim.resize_answer()
        assert count < 30
    assert (type(result), result.max_total_tokens) == (ResizeResult, 128)
    sim.run_until_idle()
    assert all(sim.tokens[f"r{i}"] == reference_output(range(i, i + 12), 14) for i in range(count))


def test_an_answer_that_is_given_elsewhere_is_not_waited_for() -> None:
    sim = ResizedSim(make_options())
    msg = make_generate("a", range(40), max_new_tokens=200)
    sim.scheduler.reqs["a"] = Req.create(msg, Route.OUTGOING, ReqState.SENDING, 200, 1)
    refusal = sim.order(40)
    assert refusal is not None
    assert (refusal.status, "may become 41 tokens" in refusal.text) == (409, True)
    assert sim.order(64) == ResizeResult(64, 256, FREED, id=3)


def test_who_waits_too_long_has_the_pool_of_before() -> None:
    sim = ResizedSim(make_options())
    busy(sim)
    assert sim.order(120, wait_s=0.5) is None
    assert sim.scheduler.memory.pool.usage()["total"] == 120
    sim.now += 1.0
    sim.resize.tick(sim.now)
    late = sim.resize_answer()
    assert late == RefusedAnswer(409, AT_THE_END, id=3)
    assert (sim.scheduler.memory.pool.end.beyond, sim.resize.aim) == (0, None)
    sim.run_until_idle()
    assert sim.tokens["end"] == reference_output(range(80), 30)


LONG_RUNS = "a request that runs may become 170 tokens long; try again later, or give it time (wait_s)"


@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(9, 120)], ids=["one group", "windows"])
def test_an_order_that_comes_to_nothing_cuts_no_answer_short(window: SimWindow) -> None:
    """Neither while it waits for requests that may become too long, nor for pages at the pool's end."""
    sim = ResizedSim(make_options(), window=window)
    sim.submit("before", range(20), max_new_tokens=150)
    sim.plan()
    assert sim.order(120, wait_s=1.0) is None
    sim.submit("meanwhile", range(40, 50), max_new_tokens=200)
    for _ in range(130):  # it becomes longer than the new pool
        sim.now -= 0.001
        sim.plan()
        sim.work()
    assert len(sim.tokens["meanwhile"]) > 108
    sim.now += 2.0
    sim.resize.tick(sim.now)
    assert sim.resize_answer() == RefusedAnswer(409, LONG_RUNS, id=3)
    sim.run_until_idle()
    assert sim.tokens["meanwhile"] == reference_output(range(40, 50), 200)


@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(9, 120)], ids=["one group", "windows"])
def test_answers_are_as_long_as_asked_for_where_the_end_does_not_empty(window: SimWindow) -> None:
    sim = ResizedSim(make_options(schedule_policy="fcfs"), window=window)
    sim.submit("first", range(100, 220), max_new_tokens=1)
    sim.run_until_idle()
    sim.submit("end", range(80), max_new_tokens=36)
    sim.submit("before", range(30), max_new_tokens=95)
    sim.plan()
    sim.work()
    assert sim.order(120, wait_s=1e6) is None
    sim.submit("waits", range(40, 50), max_new_tokens=150)
    sim.scheduler.abort(AbortReq("before"))
    while sim.scheduler.memory.pool.usage()["total"] == 256:
        sim.plan()
        sim.work()
    assert sim.scheduler.memory.pool.end.beyond
    sim.submit("shrinks", range(60, 70), max_new_tokens=150)
    sim.plan()
    cut = [sim.scheduler.reqs[rid].max_new_tokens for rid in ("waits", "shrinks")]
    assert cut == [108, 110]
    sim.now += 2e6
    sim.resize.tick(sim.now)
    assert sim.resize_answer() == RefusedAnswer(409, AT_THE_END, id=3)
    sim.run_until_idle()
    assert sim.tokens["end"] == reference_output(range(80), 36)
    assert sim.tokens["waits"] == reference_output(range(40, 50), 150)
    assert sim.tokens["shrinks"] == reference_output(range(60, 70), 150)


def test_a_pool_begins_smaller_than_it_may_become() -> None:
    sim = ResizedSim(make_options(max_total_tokens=64, max_total_tokens_limit=256))
    # Nothing beyond is committed ahead of use, and an order waits for that.
    assert list(sim.to_worker.messages) == [TrimPool(17)]
    sim.ask(ResizeReq(256, id=3))
    assert sim.scheduler.memory.pool.max_total_tokens == 64
    sim.work()
    sim.resize.tick(sim.now)
    assert sim.resize_answer() == ResizeResult(256, 64, FREED, id=3)
    sim.submit("long", range(200), max_new_tokens=3)
    sim.run_until_idle()
    assert sim.tokens["long"] == reference_output(range(200), 3)


def test_nothing_is_handed_out_again_before_its_memory_has_gone() -> None:
    """A peer could have written to it: what is let go then would be its KV."""
    sim = ResizedSim(make_options())
    sim.ask(ResizeReq(64, id=3))
    sim.outbox.flush()
    sim.ask(ResizeReq(256, id=4))
    assert sim.scheduler.memory.pool.max_total_tokens == 64
    sim.outbox.flush()
    [refused] = [m for m in sim.to_detokenizer.messages if isinstance(m, ResizeResult | RefusedAnswer)]
    assert (refused.id, refused.status) == (4, 409)


def test_an_impossible_resize_is_refused_with_the_reason() -> None:
    sim = ResizedSim(make_options())
    for tokens, says in ((3, "less than a page"), (260, "start with a larger --max-total-tokens-limit")):
        result = sim.order(tokens)
        assert result is not None
        assert (result.status, says in result.text) == (400, True)

    class Nixl:
        may_resize = False

    sim.scheduler.handovers = Nixl()  # type: ignore[assignment]
    result = sim.order(128)
    assert result is not None
    assert (result.status, "has registered the pool's memory" in result.text) == (409, True)
    sim.scheduler.handovers = NoHandovers()
    sim.order(64)
    sim.resize._host = lambda: Memory(1 << 40, 100)
    result = sim.order(256)
    assert result is not None
    assert (result.status, "GiB are free; free memory or ask for less" in result.text) == (409, True)
    sim.scheduler.worker = msgspec.structs.replace(sim.scheduler.worker, device="cuda:0")
    result = sim.order(48)
    assert result is not None
    assert (result.status, "use --device cpu" in result.text) == (409, True)


def test_memory_is_given_back_while_a_smaller_pool_is_waited_for() -> None:
    sim = ResizedSim(make_options())
    occupation = MemorySaver(sim.scheduler)
    busy(sim)
    assert sim.order(120, wait_s=1e6) is None
    assert occupation.ask(MemoryReq(True, ["kv_cache"], 1e6, id=9), sim.now) is None
    while occupation.state is MemoryState.EMPTYING:
        sim.plan()
        sim.work()
        occupation.tick(sim.now)
    sim.outbox.flush()
    assert sim.scheduler.memory.pool.usage()["free"] == 120
    assert [m for m in sim.to_detokenizer.messages if isinstance(m, MemoryResult | RefusedAnswer)] == []
    assert sim.tokens["end"] == reference_output(range(80), 30)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(10, 96)], ids=["one group", "windows"])
def test_any_sequence_of_sizes_and_requests(seed: int, window: SimWindow) -> None:
    rng = random.Random(seed)
    sim = ResizedSim(make_options(schedule_conservativeness=0.1), window=window)
    wanted: dict[str, list[int]] = {}
    answers: list[ResizeResult | RefusedAnswer | None] = []
    for i in range(60):
        if rng.random() < 0.6:
            prompt = [*range(rng.choice((0, 8, 16, 40))), *(rng.randrange(9) for _ in range(rng.randint(1, 20)))]
            count = rng.randint(1, 20)
            wanted[f"r{i}"] = reference_output(prompt, count)
            sim.submit(f"r{i}", prompt, max_new_tokens=count)
        if rng.random() < 0.5:
            answers.append(sim.order(rng.choice((96, 128, 192, 256)), wait_s=rng.choice((0.0, 0.01, 0.05))))
        for _ in range(rng.randint(0, 12)):
            sim.plan()
            answers.append(sim.resize_answer())
            sim.scheduler.check_invariants()
            sim.work()
    sim.run_until_idle()
    assert len({answer.max_total_tokens for answer in answers if isinstance(answer, ResizeResult)}) > 1
    for rid, output in wanted.items():
        if not hasattr(sim.ends[rid], "status"):
            assert sim.tokens[rid] == output, rid
    assert sum(not hasattr(end, "status") for end in sim.ends.values()) > 20
    sim.resize.tick(sim.now)
    sim.resize_answer()
    assert np.all(sim.worker.kv[sim.scheduler.memory.pool.max_total_tokens + PAGE :] == -1)


def test_routers_are_told_the_longest_request_of_the_pool_as_it_is_now() -> None:
    sim = ResizedSim(make_options(max_total_tokens=256))
    assert sim.scheduler.estimator.pace(1.0).max_tokens == 256
    sim.scheduler.memory.pool.resize(128)
    assert sim.scheduler.estimator.pace(1.0).max_tokens == sim.scheduler.longest == 128
