"""A pool that shrinks and grows while it is used: tokens stay right, books stay whole, and nobody loses pages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.sim import SimInstance, make_options, reference_output
from support.sim_tiers import TieredSim

from pdserve.mem_cache.allocator import PagedTokenToKVPoolAllocator
from pdserve.messages.base import Message
from pdserve.messages.memory import ResizeReq, ResizeResult, TrimPool
from pdserve.scheduler.pool_resize import PoolResize


class Trimmed(SimInstance):
    """Memory that was given back holds nothing that anybody could use."""

    def on_command(self, message: Message) -> None:
        assert isinstance(message, TrimPool)
        self.worker.kv[message.first * self.options.page_size :] = -1


class Tiered(TieredSim):
    """The same, with a tier behind."""

    def on_command(self, message: Message) -> None:
        if isinstance(message, TrimPool):
            self.worker.kv[message.first * self.options.page_size :] = -1
        else:
            super().on_command(message)


def order(sim: SimInstance, resize: PoolResize, tokens: int, wait_s: float = 0.0) -> ResizeResult | None:
    resize.ask(ResizeReq(3, tokens, wait_s), sim.now)
    return told(sim)


def told(sim: SimInstance) -> ResizeResult | None:
    sim.outbox.flush()
    answers = [m for m in sim.to_detokenizer.messages if isinstance(m, ResizeResult)]
    for answer in answers:
        sim.to_detokenizer.messages.remove(answer)
    assert len(answers) <= 1
    return answers[0] if answers else None


def test_pages_that_are_withheld_are_never_handed_out() -> None:
    allocator = PagedTokenToKVPoolAllocator(8 * 4, 4)
    taken = allocator.alloc_extend(0, 8, 0)
    assert taken is not None
    allocator.resize(3)
    allocator.check_invariants()
    assert sorted(allocator.free_pages()) == [3]
    assert allocator.alloc_extend(0, 8, 0) is None
    with pytest.raises(ValueError, match="can't be one of 1"):
        allocator.resize(1)
    allocator.resize(8)
    with pytest.raises(ValueError, match="can't be one of 9"):
        allocator.resize(9)
    allocator.free(taken)
    allocator.check_invariants()
    assert sorted(allocator.free_pages()) == list(range(1, 9))
    # What is new goes out last: its memory was given back.
    again = allocator.alloc_extend(0, 12, 0)
    assert again is not None
    assert sorted(set((again // 4).tolist())) == [1, 2, 3]


@pytest.mark.parametrize("make", [Trimmed, Tiered])
def test_what_is_cached_gives_way_and_nothing_else_is_lost(make: Any) -> None:
    sim = make(64, store=False, hicache_write_policy="write_back") if make is Tiered else make(make_options())
    resize = PoolResize(sim.scheduler)
    for i in range(3):
        sim.submit(f"r{i}", range(100 * i, 100 * i + 60), max_new_tokens=4)
    (sim.settle if make is Tiered else sim.run_until_idle)()
    assert sim.scheduler.memory.usage()["cached"] > 64
    result = order(sim, resize, 67)
    assert result == ResizeResult(3, 200, 64, 256)
    assert sim.to_worker.messages[-1] == TrimPool(17)  # behind page 0 and sixteen of four tokens
    sim.scheduler.check_invariants()
    usage = sim.scheduler.memory.usage()
    assert usage["total"] == usage["free"] + usage["cached"] == 64
    sim.submit("long", range(80), max_new_tokens=1)
    sim.submit("fits", range(50), max_new_tokens=9)
    (sim.settle if make is Tiered else sim.run_until_idle)()
    assert sim.tokens["fits"] == reference_output(range(50), 9)
    assert sim.ends["long"].status == 400  # type: ignore[union-attr]
    assert order(sim, resize, 256) == ResizeResult(3, 200, 256, 64)
    sim.submit("again", range(80), max_new_tokens=5)
    (sim.settle if make is Tiered else sim.run_until_idle)()
    assert sim.tokens["again"] == reference_output(range(80), 5)
    # What the host had saved of evicted pages is right, and was saved before they went.
    for i in range(3):
        sim.submit(f"s{i}", range(100 * i, 100 * i + 60), max_new_tokens=4)
        (sim.settle if make is Tiered else sim.run_until_idle)()
        assert sim.tokens[f"s{i}"] == reference_output(range(100 * i, 100 * i + 60), 4)
    assert make is Trimmed or all(sim.ends[f"s{i}"].meta.cached_tokens == 56 for i in range(3))  # type: ignore[union-attr]


def test_nothing_is_evicted_in_vain() -> None:
    sim = Trimmed(make_options())
    resize = PoolResize(sim.scheduler)
    sim.submit("cached", range(100, 120), max_new_tokens=4)
    sim.run_until_idle()
    sim.submit("a", range(90), max_new_tokens=6)
    for _ in range(4):
        sim.plan()
        sim.work()
    cached = sim.scheduler.memory.usage()["cached"]
    assert cached
    assert order(sim, resize, 100, wait_s=1e6) is None
    assert sim.scheduler.memory.usage()["cached"] == cached
    sim.run_until_idle()
    resize.advance(sim.now)
    assert told(sim) == ResizeResult(3, 200, 100, 256)
    assert sim.tokens["a"] == reference_output(range(90), 6)


def test_requests_keep_their_pages_and_what_they_were_promised() -> None:
    sim = Trimmed(make_options())
    resize = PoolResize(sim.scheduler)
    sim.submit("a", range(40), max_new_tokens=60)
    sim.plan()
    refused = order(sim, resize, 64)
    assert refused is not None
    assert (refused.status, refused.max_total_tokens) == (409, 256)
    assert "may become 100 tokens long" in refused.message
    assert order(sim, resize, 64, wait_s=30.0) is None
    busy = order(sim, resize, 128)
    assert busy is not None
    assert busy.status == 409
    result = None
    while result is None:
        sim.plan()
        sim.work()
        resize.advance(sim.now)
        result = told(sim)
    assert (result.status, result.max_total_tokens) == (200, 64)
    assert sim.tokens["a"] == reference_output(range(40), 60)
    # Or it goes on as it is when the time is up.
    order(sim, resize, 256)
    sim.submit("b", range(40), max_new_tokens=60)
    sim.plan()
    order(sim, resize, 64, wait_s=0.5)
    assert resize.seconds_left(sim.now) == pytest.approx(0.5)
    sim.now += 0.5
    resize.advance(sim.now)
    late = told(sim)
    assert late is not None
    assert (late.status, sim.scheduler.memory.max_total_tokens) == (409, 256)
    sim.run_until_idle()
    assert sim.tokens["b"] == reference_output(range(40), 60)


def test_who_cannot_is_told_why() -> None:
    sim = Trimmed(make_options())
    resize = PoolResize(sim.scheduler)
    for tokens, says in ((3, "less than a page"), (260, "start with a larger --max-total-tokens")):
        result = order(sim, resize, tokens)
        assert result is not None
        assert (result.status, says in result.message) == (400, True)
    sim.scheduler.handovers = object()  # type: ignore[assignment]
    result = order(sim, resize, 128)
    assert result is not None
    assert (result.status, "exchanges KV" in result.message) == (409, True)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_sizes_and_requests(seed: int) -> None:
    rng = random.Random(seed)
    sim = Trimmed(make_options(schedule_conservativeness=0.1))
    resize = PoolResize(sim.scheduler)
    wanted: dict[str, list[int]] = {}
    sizes = set()
    for i in range(60):
        if rng.random() < 0.6:
            prompt = [*range(rng.choice((0, 8, 16, 40))), *(rng.randrange(9) for _ in range(rng.randint(1, 20)))]
            count = rng.randint(1, 20)
            wanted[f"r{i}"] = reference_output(prompt, count)
            sim.submit(f"r{i}", prompt, max_new_tokens=count)
        if rng.random() < 0.5:
            order(sim, resize, rng.choice((96, 128, 192, 256)), wait_s=rng.choice((0.0, 0.01)))
        for _ in range(rng.randint(0, 12)):
            sim.plan()
            resize.advance(sim.now)
            told(sim)
            sim.scheduler.check_invariants()
            sim.work()
            sizes.add(sim.scheduler.memory.max_total_tokens)
    sim.run_until_idle()
    assert len(sizes) > 2
    for rid, output in wanted.items():
        if not hasattr(sim.ends[rid], "status"):
            assert sim.tokens[rid] == output, rid
    assert sum(not hasattr(end, "status") for end in sim.ends.values()) > 20
    assert np.all(sim.worker.kv[sim.scheduler.memory.max_total_tokens + 4 :] == -1)
