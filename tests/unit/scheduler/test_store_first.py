"""A decode's own store before its prefill: when it is asked, and what comes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.sim import reference_output
from support.sim_pair import assert_all_returned, run_until_idle
from support.sim_tiered_pair import TieredPair
from support.stored_prompt import PROMPT, SLOW, Says, first_counts, make_pair, stored

from pdserve.disaggregation.handover.kv_receiver import ReceiverState, StoreStage
from pdserve.disaggregation.handover.placement_policy import Prospects
from pdserve.disaggregation.handover.store_first import PATIENCE, patience_ms
from pdserve.mem_cache.page_hash import prompt_hashes
from pdserve.messages.handover import ForecastRequest, TransferRequest
from pdserve.messages.outputs import CachedBeyond, HeldTokens
from pdserve.messages.requests import AbortReq
from pdserve.messages.tiers import FetchPages, FindPages
from pdserve.messages.worker import VerifyPages
from pdserve.scheduler import store_link
from pdserve.scheduler.first_token import NOTHING
from pdserve.scheduler.req import ReqState
from pdserve.scheduler.store_index import LOOK_SECONDS, StoreIndex

STORED = 40


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


def each(ms: float):
    return lambda count: ms * count


def never(count: int) -> float:
    return math.inf


@pytest.mark.parametrize(
    ("what", "pages", "fetch_ms", "prospects", "gain"),
    [
        # 160 tokens are missing, pages of 16.
        ("computed here, all of it comes", 10, 20.0, Prospects(each(1.0), 900.0, each(0.0)), 160.0),
        ("computed here, half of it comes", 5, 20.0, Prospects(each(1.0), 900.0, each(0.0)), 80.0),
        ("the store has nothing", 0, 0.0, Prospects(each(1.0), 900.0, each(0.0)), 0.0),
        ("it takes longer than computing", 10, 161.0, Prospects(each(1.0), 900.0, each(0.0)), 0.0),
        ("it takes a little less", 10, 159.0, Prospects(each(1.0), 900.0, each(0.0)), 160.0),
        ("the prefill has it all", 10, 20.0, Prospects(each(1.0), 10.0, each(1.0)), 0.0),
        ("it has as much to fetch, and then to send", 10, 20.0, Prospects(each(1.0), 20.0, each(0.1)), 21.0),
        ("the prefill is soon, its network is slow", 10, 20.0, Prospects(each(9.0), 10.0, each(30.0)), 310.0),
        ("the prefill is soon, so is its KV", 10, 20.0, Prospects(each(9.0), 10.0, each(0.5)), 0.0),
        ("it is computed there in any case", 10, 20.0, Prospects(never, 0.0, each(30.0)), 300.0),
        ("there, half of the pages need not travel", 5, 20.0, Prospects(never, 0.0, each(30.0)), 150.0),
        ("there, and the network is faster than the store", 10, 20.0, Prospects(never, 0.0, each(2.0)), 0.0),
        ("the rest is computed here instead of there", 9, 20.0, Prospects(each(1.0), 100.0, each(1.0)), 94.0),
    ],
)
def test_the_store_is_waited_for_where_that_is_sooner(what, pages, fetch_ms, prospects, gain):
    assert patience_ms(160, pages, 16, fetch_ms, prospects) == pytest.approx(PATIENCE * gain), what


def test_a_store_is_known_by_what_it_took():
    index = StoreIndex(page_bytes=1_000_000)
    assert index.ms(100, 1.0) == pytest.approx(100.0)
    for pages in (10, 100) * 60:
        index.learn(pages, 0.05 * pages, now=1.0)
        index.learn(0, 9.0, now=1.0)  # it had nothing: that says nothing
    assert index.ms(100, 1.0) == pytest.approx(5000.0, rel=0.2)
    assert index.ms(100, 1e4) == pytest.approx(100.0, rel=0.1)


def room(pair: TieredPair):
    (receiver,) = pair.decode.receivers.rooms.values()
    return receiver


def is_here(pair: TieredPair) -> bool:
    """Return whether the decode has decided to compute the prompt itself."""
    return not any(r.state is not ReceiverState.DECLINED for r in pair.decode.receivers.rooms.values())


def until(pair: TieredPair, is_so, *, store: bool = False) -> None:
    """Let everything move, the store where it may, until that is so."""
    for _ in range(500):
        if is_so():
            return
        stores = [pair.decode.serve_store, pair.prefill.serve_store]
        for move in pair.moves():
            if move not in stores:
                move()
                if is_so():
                    return
        for serve in stores if store else ():
            serve()
    raise AssertionError("it never came to that")


def asked(pair: TieredPair) -> list[TransferRequest]:
    return [m for m in pair.to_prefill if isinstance(m, TransferRequest)]


def test_what_the_store_has_is_computed_neither_here_nor_there():
    pair = make_pair()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)
    meta = pair.decode.ends["a"].meta
    assert (meta.route, meta.cached_tokens, meta.cached_beyond) == ("local", STORED, CachedBeyond(0, STORED))
    assert meta.held is None
    assert pair.prefill.ends["a"].finish.type == "declined"
    assert first_counts(pair) == (1, 0, 0, STORED)
    assert pair.decode.scheduler.counters.prompt_tokens == 2
    assert pair.decode.tiers.counts.hit_store == pair.decode.scheduler.planner.hit_tokens == STORED
    assert_all_returned(pair)


def test_what_the_store_has_is_not_sent():
    pair = make_pair(lag_ms=30.0, disaggregation_threshold="always")
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: asked(pair), store=True)
    assert asked(pair)[0].decode_prefix_len == STORED
    assert len(asked(pair)[0].dst_pages[0]) == 4
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)
    meta = pair.decode.ends["a"].meta
    assert (meta.route, meta.held) == ("incoming", HeldTokens(0, 0, STORED))
    assert first_counts(pair) == (1, 0, 0, STORED)
    # What the decode has, and what the prefill, which has a share in the store, found for itself.
    assert (meta.cached_tokens, meta.cached_beyond) == (STORED, CachedBeyond(0, STORED))
    assert_all_returned(pair)


def test_a_prefill_answers_from_the_store():
    pair = make_pair(disaggregation_threshold="always")
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)
    meta = pair.decode.ends["a"].meta
    assert (meta.cached_tokens, meta.cached_beyond) == (STORED, CachedBeyond(0, STORED))
    assert meta.held == HeldTokens(0, 0, 0)
    assert pair.prefill.scheduler.counters.prompt_tokens == 2
    assert first_counts(pair) == (0, 0, 0, 0)


def test_a_prefill_s_forecast_counts_what_its_tiers_have():
    """What the store has it need not compute, nor what is in host memory: of the next request with this prompt."""
    pair = make_pair(disaggregation_threshold="auto", here=SLOW)
    pair.prefill.senders.estimates._estimator = pair.prefill.scheduler.estimator
    asked_of: list[int] = []

    def ms(req, uncached, now, expected=NOTHING):
        asked_of.append(uncached)
        return SLOW * (uncached > 2)

    pair.prefill.scheduler.estimator.first_token_ms = ms
    pair.decode.store.kept = {}
    pair.prefill.submit("busy", range(60, 90), max_new_tokens=30)  # or it would begin before it is asked
    pair.prefill.plan()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    assert asked_of[-1] == 2
    asked_of.clear()
    pair.prefill.scheduler.memory.pool.cache.reset()
    pair.decode.scheduler.memory.flush()
    looks = sum(isinstance(m, FindPages) for m in pair.prefill.store_queue)
    pair.prefill.submit("busy too", range(30, 60), max_new_tokens=30)
    pair.prefill.plan()
    pair.submit("b", PROMPT, 2, max_new_tokens=5)
    until(pair, lambda: "b" in pair.decode.ends, store=True)
    assert asked_of == [2]
    assert sum(isinstance(m, FindPages) for m in pair.prefill.store_queue) == looks == 0
    assert pair.prefill.tiers.counts.hit_host >= STORED


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("the prefill is sooner", {"there": 0.0}),
        ("it computes in any case, and its network is fast", {"disaggregation_threshold": "always"}),
        ("nobody waits for a store", {"hicache_storage_prefetch_policy": "best_effort"}),
    ],
)
def test_the_decode_fetches_nothing_where(what, changes):
    pair = make_pair(**changes)
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    assert pair.decode.tiers.counts.asked == 0, what
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)


def test_the_look_goes_out_with_the_question_for_the_forecast():
    pair = make_pair()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: pair.decode.store_queue)
    (look,) = pair.decode.store_queue
    assert isinstance(look, FindPages)
    assert any(isinstance(m, ForecastRequest) for m in [*pair.to_prefill, *pair.link.unsent])


@pytest.mark.parametrize("stage", [StoreStage.LOOKING, StoreStage.FETCHING])
def test_a_store_that_does_not_answer_is_waited_for_as_long_as_it_pays(stage):
    pair = make_pair()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: pair.decode.store_queue)
    began = pair.now
    if stage is StoreStage.FETCHING:
        pair.decode.serve_store()
        until(pair, lambda: room(pair).store is StoreStage.FETCHING)
        began = pair.now
    until(pair, lambda: is_here(pair))
    # 42 tokens take 42 ms here, with those of the store two. What has not said what it has for as long is no gain.
    limit = 0.040 if stage is StoreStage.LOOKING else PATIENCE * 0.040
    assert began + 0.5 * limit < pair.now < began + limit + 0.02
    assert first_counts(pair) == ((0, 0, 0, 0) if stage is StoreStage.LOOKING else (0, 1, 0, 0))
    until(pair, lambda: "a" in pair.decode.ends)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)
    assert pair.decode.ends["a"].meta.cached_tokens == 0
    # The next one does not look at a store that owes an answer.
    looks = len(pair.decode.store_queue)
    pair.now += LOOK_SECONDS
    pair.submit("b", PROMPT[::-1], 2, max_new_tokens=5)
    until(pair, lambda: "b" in pair.decode.ends)
    assert not any(isinstance(m, FindPages) for m in list(pair.decode.store_queue)[looks:])
    run_until_idle(pair)
    assert_all_returned(pair)


def test_pages_that_come_too_late_are_the_next_one_s():
    pair = make_pair()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: any(isinstance(m, FindPages) for m in pair.decode.store_queue))
    pair.decode.serve_store()
    until(pair, lambda: "a" in pair.decode.ends)
    assert first_counts(pair) == (0, 1, 0, 0)
    until(pair, lambda: not pair.decode.tiers.store.fetching, store=True)
    assert pair.decode.tiers.counts.fetched == 10
    run_until_idle(pair)
    assert_all_returned(pair)


def prompt_names() -> list[bytes]:
    """Return the names of the prompt's pages, in its order."""
    return prompt_hashes(TieredPair().decode.tiers.seed(), np.array(PROMPT, dtype=np.int32), 4, "")


@pytest.mark.parametrize(
    ("fault", "came"),
    [("dead", 0), ("dies between", 0), ("partial", 16), ("corrupt", 20), ("all corrupt", 0), ("lost between", 0)],
)
@pytest.mark.parametrize("threshold", ["auto", "always"])
def test_whatever_the_store_does_the_tokens_are_the_same(fault, came, threshold):
    kept = stored()
    if fault == "partial":
        kept = {name: kept[name] for name in prompt_names()[:4]}
    elif fault == "corrupt":
        name = prompt_names()[5]
        kept[name] = kept[name][:-1] + bytes([kept[name][-1] ^ 1])
    elif fault == "all corrupt":
        kept = {name: framed[:-1] for name, framed in kept.items()}
    pair = make_pair(kept, lag_ms=30.0, disaggregation_threshold=threshold)
    pair.prefill.store.kept = {}  # else it would mend this one
    pair.decode.store.dead = fault == "dead"
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    if "between" in fault:
        until(pair, lambda: any(isinstance(m, FetchPages) for m in pair.decode.store_queue) or first_look(pair))
        pair.decode.store.dead = fault == "dies between"
        if fault == "lost between":
            pair.kept.clear()
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 5)
    meta = pair.decode.ends["a"].meta
    if threshold == "auto":
        assert meta.cached_tokens == came
    else:
        assert meta.held == HeldTokens(0, 0, came)
    assert first_counts(pair)[3] == came
    run_until_idle(pair)
    assert_all_returned(pair)


def first_look(pair: TieredPair) -> bool:
    """Let the decode's store answer a look; false, as it is not what is waited for."""
    if pair.decode.store_queue and isinstance(pair.decode.store_queue[0], FindPages):
        pair.decode.serve_store()
    return False


@pytest.mark.parametrize("stage", [StoreStage.LOOKING, StoreStage.FETCHING])
@pytest.mark.parametrize("how", ["abort", "link"])
def test_a_request_may_end_while_the_store_is_asked(stage, how):
    pair = make_pair()
    pair.submit("a", PROMPT, 1, max_new_tokens=5)
    until(pair, lambda: room(pair).there_ms is not None)
    if stage is StoreStage.FETCHING:
        pair.decode.serve_store()
        until(pair, lambda: room(pair).store is stage)
    assert room(pair).store is stage
    if how == "abort":
        pair.decode.scheduler.abort(AbortReq("a", "its client left"))
    else:
        pair.lose_link()
        pair.link_is_down()
    run_until_idle(pair)
    assert pair.decode.ends["a"] is not None
    index = pair.decode.tiers.store.index
    assert not index._looks
    assert not index._looking
    assert not index._seen
    assert not pair.decode.tiers.store.fetching
    assert_all_returned(pair)


def test_a_request_that_has_ended_with_its_first_token_leaves_what_was_fetched():
    """Its KV lands after it; the fetched pages, verified with the others, are cached for the next one."""
    pair = make_pair(lag_ms=30.0, disaggregation_threshold="always")
    pair.submit("a", PROMPT, 1, max_new_tokens=1)
    until(pair, lambda: "a" in pair.decode.ends, store=True)
    assert first_counts(pair)[3] == STORED
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(PROMPT, 1)
    assert pair.decode.scheduler.memory.pool.cache.peek(np.array(PROMPT, dtype=np.int32)) == STORED
    assert_all_returned(pair)


def test_pages_that_have_just_landed_are_loaded_from_the_host_behind_their_copy_to_it():
    """One request's KV lands while another of the same prompt waits for the store, which gives nothing in time.

    What it then finds in host memory is named there already, and has to be there, too, when it is loaded.
    """
    pair = make_pair(there=0.0)
    pair.submit("a", PROMPT, 1, max_new_tokens=3)
    until(pair, lambda: any(isinstance(m, VerifyPages) for m in pair.decode.to_transfer.messages), store=True)
    pair.prefill.senders.estimates._estimator = Says(ms=SLOW)
    turn = [*PROMPT, 1, 2, 3, 4, 5]
    pair.submit("b", turn, 2, max_new_tokens=3)
    receivers = pair.decode.receivers
    while (b := receivers.rooms[2]).store is not StoreStage.FETCHING:
        pair.advance()
        for _ in range(len(pair.to_prefill)):
            pair.deliver_to_prefill()
        for _ in range(len(pair.to_decode)):
            pair.deliver_to_decode()
        pair.decode.outbox.all_to_worker(pair.decode.tiers.take(pair.now))
        pair.decode.outbox.flush()
        while pair.decode.to_worker.messages:
            pair.decode.work()
        if b.store is StoreStage.LOOKING:
            pair.decode.serve_store()
    assert b.req.computed == 0
    while pair.decode.to_transfer.messages:
        pair.decode.transfer()
    assert pair.decode.scheduler.reqs["a"].state is ReqState.RUNNING
    pair.now += 0.2
    pair.advance()
    assert b.req.computed == STORED
    assert b.req.cached_beyond == CachedBeyond(STORED, 0)
    run_until_idle(pair)
    for rid, prompt in (("a", PROMPT), ("b", turn)):
        assert pair.decode.tokens[rid] == reference_output(prompt, 3)
    assert_all_returned(pair)
