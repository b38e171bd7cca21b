"""The tiers behind the KV pool, over the simulated model: a page that comes back is the right one, or doesn't."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from support.scrape import metrics_of
from support.sim import SimInstance, SimWindow, reference_output
from support.sim_tiers import TieredSim

from pdserve.mem_cache.host_tier import HostTier
from pdserve.mem_cache.page_hash import prompt_hashes
from pdserve.mem_cache.storage.base import StoreUnavailable
from pdserve.messages.outputs import CachedBeyond
from pdserve.messages.tiers import PageCopy
from pdserve.model_runner.tiers import store_engine
from pdserve.scheduler import store_link


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def ask(sim: TieredSim, rid: str, tokens: list[int], max_new_tokens: int = 4) -> int:
    """Have it answered, rightly; tokens that were found cached."""
    sim.submit(rid, tokens, max_new_tokens=max_new_tokens)
    sim.settle()
    assert sim.tokens[rid] == reference_output(tokens, max_new_tokens), rid
    return sim.ends[rid].meta.cached_tokens


def displace(sim: TieredSim, count: int = 8) -> None:
    """Fill the pool (256 tokens) with others."""
    for i in range(count):
        ask(sim, f"other-{sim.now}-{i}", prompt(1000 + i))


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_the_pool_gave_up_comes_back_from_the_host(policy):
    sim = TieredSim(200, hicache_write_policy=policy, store=False)
    assert ask(sim, "first", prompt(1)) == 0
    displace(sim)
    assert sim.scheduler.memory.pool.cache.peek(prompt(1)) == 0
    assert ask(sim, "again", prompt(1)) == 36
    assert sim.tiers.counts.loaded == 9


def test_write_through_selective_keeps_what_was_found_twice():
    sim = TieredSim(200, hicache_write_policy="write_through_selective", store=False)
    for name in "abc":
        ask(sim, f"first-{name}", prompt(1))
    ask(sim, "other", prompt(2))
    displace(sim)
    assert ask(sim, "again", prompt(1)) == 36
    assert ask(sim, "other again", prompt(2)) == 0


def test_another_instance_goes_on_from_the_store():
    sim = TieredSim()
    ask(sim, "first", prompt(1), max_new_tokens=20)
    other = TieredSim(200, kept=sim.store.kept)
    follow_up = prompt(1) + reference_output(prompt(1), 20) + prompt(2, 10)
    # The last token's KV was not computed, and a page is stored whole.
    assert ask(other, "second turn", follow_up) == 56
    assert other.tiers.counts.fetched == 14


def test_namespaces_and_models_share_nothing():
    ids = np.array(prompt(1), dtype=np.int32)
    seeds = [b"one", b"two"]
    names = {h for seed in seeds for key in ("", "tenant") for h in prompt_hashes(seed, ids, 4, key)}
    assert len(names) == 4 * 10


def test_a_request_waits_for_the_store_as_long_as_its_policy_says(monkeypatch):
    stored = TieredSim()
    ask(stored, "first", prompt(1))
    waits = {}
    for policy in ("best_effort", "timeout", "wait_complete"):
        sim = TieredSim(kept=stored.store.kept, hicache_storage_prefetch_policy=policy)
        sim.submit("r", prompt(1), max_new_tokens=4)
        begun = sim.now
        while "r" not in sim.ends and sim.now - begun < 60:
            sim.plan()
            sim.now += 0.05
            sim.work()
        waits[policy] = sim.now - begun
        # It is served without: the store has not been asked as yet.
        assert sim.tokens["r"] == reference_output(prompt(1), 4)
        assert sim.ends["r"].meta.cached_tokens == 0
        sim.settle()
    assert 0.2 < waits["timeout"] - waits["best_effort"] < 0.4
    assert 9.9 < waits["wait_complete"] - waits["best_effort"] < 10.2


def test_a_dead_store_is_left_alone_and_asked_again_later():
    sim = TieredSim(200)
    sim.store.dead = True
    for i in range(6):
        ask(sim, f"r{i}", prompt(i))
    assert sim.tiers.store.state.breaker == "open"
    assert sim.tiers.store.problem(sim.now).endswith("without it: dead")
    sim.store.dead = False
    sim.now += 100
    # Without any request, what it could not take before is given to it as well.
    sim.settle()
    assert len(sim.store.kept) > 50
    assert sim.tiers.store.state.breaker == "closed"
    assert sim.tiers.store.problem(sim.now) == ""


def test_what_could_not_be_stored_is_tried_again_without_requests():
    sim = TieredSim(200)
    sim.store.dead = True
    ask(sim, "r", prompt(1))
    sim.store.dead = False
    assert not sim.store.kept
    while (wait := sim.tiers.store.timeout(sim.now)) is not None:
        assert wait <= 2
        sim.now += wait
        sim.settle()
    assert len(sim.store.kept) == 10


def test_a_store_that_can_be_read_and_takes_nothing_is_reported(monkeypatch):
    def refuse(*_) -> None:
        raise StoreUnavailable("read-only")

    sim = TieredSim(200)
    with monkeypatch.context() as broken:
        broken.setattr(sim.store, "set", refuse)
        for i in range(4):  # what is read between writes keeps the store from being left alone
            ask(sim, f"r{i}", prompt(i))
            sim.now += 10
            sim.settle()
        assert sim.tiers.store.state.breaker == "closed"
        assert sim.tiers.store.problem(sim.now).endswith("refuses pages; serving continues without it: read-only")
    sim.now += 100
    sim.settle()
    assert len(sim.store.kept) == 40
    assert sim.tiers.store.problem(sim.now) == ""


def test_what_comes_due_behind_a_turn_is_no_reason_to_sleep():
    sim = TieredSim(kept={b"x": b""}, hicache_storage_prefetch_policy="timeout")
    sim.submit("r", prompt(1), max_new_tokens=4)
    sim.plan()
    assert sim.tiers.store.timeout(sim.now) > 0.2
    assert sim.tiers.store.timeout(sim.now + 9) == 0
    sim.now += 9
    sim.plan()
    assert sim.tiers.store.timeout(sim.now) is None
    sim.settle()


def test_a_store_that_does_not_answer_is_asked_nothing_more_and_reported():
    sim = TieredSim(200)
    sim.submit("r", prompt(1), max_new_tokens=4)
    while "r" not in sim.ends:  # the store is not served
        sim.plan()
        sim.work()
        sim.now += 0.1
    asked = len(sim.store_queue)
    assert "has not answered for 1" in sim.tiers.store.problem(sim.now)
    sim.submit("other", prompt(2), max_new_tokens=4)
    while "other" not in sim.ends:
        sim.plan()
        sim.work()
    assert len(sim.store_queue) == asked
    sim.settle()
    assert sim.tiers.store.problem(sim.now) == ""
    assert len(sim.store.kept) == 20


@pytest.mark.parametrize("bit", [0, 5, 40 * 8 + 3])
def test_a_spoilt_page_is_computed_again(bit):
    stored = TieredSim()
    ask(stored, "first", prompt(1))
    kept = dict(stored.store.kept)
    victim = prompt_hashes(stored.tiers.seed(), np.array(prompt(1), dtype=np.int32), 4, "")[3]
    frame = bytearray(kept[victim])
    frame[bit // 8] ^= 1 << bit % 8
    kept[victim] = bytes(frame)
    sim = TieredSim(kept=kept)
    assert ask(sim, "again", prompt(1)) == 12
    assert sim.store.bad == 1


def fail(sim: TieredSim, rid: str, tokens: list[int]) -> None:
    """Ask, and have logits that are not finite, in each step that is sent before the first result is here."""
    original = sim.scheduler.on_step_result

    def spoil(result, now):
        result.bad_entries = [0]
        original(result, now)

    sim.scheduler.on_step_result = spoil
    sim.submit(rid, tokens, max_new_tokens=4)
    sim.settle()
    sim.scheduler.on_step_result = original
    assert sim.ends[rid].status == 500


def test_condemned_pages_are_nowhere():
    sim = TieredSim(200)
    fail(sim, "bad", prompt(1))
    assert not sim.store.kept
    assert len(sim.tiers.host) == 0
    assert ask(sim, "again", prompt(1)) == 0


def names_of(sim: TieredSim, tokens: list[int]) -> list[bytes]:
    return prompt_hashes(sim.tiers.seed(), np.array(tokens, dtype=np.int32), 4, "")


def test_a_prompt_that_the_model_can_not_take_leaves_others_what_they_share_with_it():
    sim, system = TieredSim(200), prompt(1)
    shared = names_of(sim, system)
    ask(sim, "first", [*system, 1, 2, 3])
    for i in range(3):
        bad = system + [50 + i] * 9
        fail(sim, f"bad-{i}", bad)
        assert set(shared) <= sim.store.kept.keys()
        assert len(sim.tiers.host.match(shared)) == 10
        assert not set(names_of(sim, bad)[10:]) & sim.store.kept.keys()
        assert ask(sim, f"good-{i}", [*system, 4 + i]) == 40


def test_pages_with_which_request_after_request_fails_are_nowhere():
    """They were good once, so it takes two: perhaps something has written over them since."""
    sim, system = TieredSim(200), prompt(1)
    ask(sim, "first", system)
    fail(sim, "bad", [*system, 1])
    fail(sim, "bad too", [*system, 2])
    assert not sim.store.kept
    assert len(sim.tiers.host) == 0
    assert ask(sim, "again", system) == 0


def test_a_request_that_still_runs_speaks_for_what_it_began_with():
    sim, system = TieredSim(200), prompt(1)
    sim.submit("long", system, max_new_tokens=100)
    while len(sim.tokens.get("long", [])) < 3:
        sim.plan()
        sim.work()
    original, count = sim.scheduler.on_step_result, 0
    known = {*sim.scheduler.reqs}

    def spoil(result, now):
        nonlocal count
        step = sim.scheduler._in_flight[0]
        result.bad_entries = [i for i, req in enumerate(step.entries) if req.rid not in known]
        count += len(result.bad_entries)
        original(result, now)

    sim.scheduler.on_step_result = spoil
    for i in range(3):
        sim.submit(f"bad-{i}", [*system, i], max_new_tokens=4)
        while f"bad-{i}" not in sim.ends:
            sim.plan()
            sim.work()
    assert count >= 3
    assert "long" not in sim.ends
    assert sim.scheduler.memory.pool.cache.peek(np.array(system, dtype=np.int32)) == 40
    sim.scheduler.on_step_result = original
    sim.settle()
    assert sim.tokens["long"] == reference_output(system, 100)


def test_flushing_forgets_the_host_and_keeps_the_store():
    sim = TieredSim(200)
    ask(sim, "first", prompt(1))
    sim.scheduler.memory.flush()
    assert len(sim.tiers.host) == 0
    assert sim.store.kept
    sim.scheduler.check_invariants()


def test_host_pages_that_are_read_have_no_other_owner():
    host = HostTier(3)
    pages = [host.keep(bytes([i])) for i in range(3)]
    host.pin(pages[:2])
    host.drop([bytes([0])])
    assert host.free_pages == 0
    assert host.keep(b"x") == pages[2]
    assert host.keep(b"y") == pages[2]
    host.pin([pages[2]])
    assert host.keep(b"z") is None
    host.check_invariants()
    host.unpin(pages)
    assert host.free_pages == 1
    host.check_invariants()


def test_the_breaker_answers_in_the_stores_place(monkeypatch):
    monkeypatch.setattr(store_engine, "USAGE_SECONDS", 0.0)
    sim = TieredSim(200)
    sim.store.dead = True
    asked = []
    monkeypatch.setattr(
        sim.store, "_ask", lambda: asked.append(1) or (_ for _ in ()).throw(store_engine.StoreError("x"))
    )
    for i in range(10):
        ask(sim, f"r{i}", prompt(i))
    # Three in a row, and then one a second, two, four …: virtual time goes on by seconds only.
    assert len(asked) < 12


def test_a_client_is_told_from_where_its_cached_tokens_came():
    stored = TieredSim()
    ask(stored, "first", prompt(1))
    sim = TieredSim(200, kept=stored.store.kept)
    ask(sim, "begin", prompt(1)[:9])  # too short for the store to be asked for more than its two pages
    ask(sim, "r", prompt(1))
    meta = sim.ends["r"].meta
    assert (meta.cached_tokens, meta.cached_beyond) == (36, CachedBeyond(host=0, store=28))
    displace(sim)
    ask(sim, "again", prompt(1))
    meta = sim.ends["again"].meta
    assert (meta.cached_tokens, meta.cached_beyond) == (36, CachedBeyond(host=36, store=0))
    page = metrics_of(sim.scheduler)
    beyond = "pdserve_prefix_cache_beyond_tokens_total"
    assert (page.total(beyond, tier="host"), page.total(beyond, tier="store")) == (36, 36)
    assert 200 < page.total("pdserve_kv_store_tokens") <= 4 * len(sim.store.kept)  # told once a second
    alone = SimInstance()
    alone.submit("r", prompt(1), max_new_tokens=4)
    alone.run_until_idle()
    assert alone.ends["r"].meta.cached_beyond is None


WINDOWED = SimWindow(window=12, tokens=64)


def test_what_lies_behind_windows_comes_back_as_far_as_the_next_token_sees():
    sim = TieredSim(200, window=WINDOWED)
    assert ask(sim, "first", prompt(1)) == 0
    displace(sim)
    copies = []
    original = sim.host.copy
    sim.host.copy = lambda pools, triples: (copies.extend(triples.tolist()), original(pools, triples))
    assert ask(sim, "again", prompt(1)) == 36
    kinds = Counter(what for what, _, _ in copies)
    # A token sees itself and 11 before it: 3 pages.
    assert (kinds[PageCopy.TO_POOL], kinds[PageCopy.WINDOW_TO_POOL]) == (9, 3)
    other = TieredSim(200, kept=sim.store.kept, window=WINDOWED)
    assert ask(other, "elsewhere", prompt(1) + prompt(2, 9)) == 40
    assert other.tiers.counts.fetched == 10


def test_who_keeps_what_lies_behind_windows_finds_nothing_of_who_does_not():
    sim = TieredSim(200, window=WINDOWED)
    ask(sim, "first", prompt(1))
    masks = TieredSim(200, kept=sim.store.kept)
    assert ask(masks, "again", prompt(1)) == 0


def test_a_long_output_is_saved_as_far_as_its_windows_were_there():
    """The rest is computed again: window pages are few here, and the output's first ones were reused."""
    sim = TieredSim(200, window=WINDOWED._replace(tokens=24))
    ask(sim, "first", prompt(1), max_new_tokens=60)
    displace(sim)
    follow_up = prompt(1) + reference_output(prompt(1), 60) + [3, 4]
    assert ask(sim, "again", follow_up) == 40
    sim.scheduler.check_invariants()
