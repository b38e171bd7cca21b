"""A decode's own store before its prefill, in random orders of events: nothing is lost, and mistakes are found."""

from __future__ import annotations

import random

import pytest
from support.sim import NO_WINDOW, SimWindow, reference_output
from support.sim_pair import assert_all_returned, run_until_idle
from support.stored_prompt import first_counts, make_pair

from pdserve.disaggregation.handover.kv_receiver import StoreStage
from pdserve.disaggregation.handover.store_first import StoreFirst
from pdserve.messages.requests import AbortReq
from pdserve.scheduler import store_link
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.tiers import KVTiers


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


def attack(seed: int) -> tuple[int, int]:
    """Hold conversations over pairs that are started anew, with a store that loses, delays and damages pages.

    Return how often pages came from the store, and how often they were asked for.
    """
    rng = random.Random(seed)
    kept: dict[bytes, bytes] = {}
    talks = [[rng.randrange(97) for _ in range(rng.randint(4, 30))] for _ in range(3)]
    came = tried = 0
    page_size, window = rng.choice([1, 4, 8]), rng.choice([NO_WINDOW, SimWindow(16, 96)])
    for life in range(3):
        threshold = rng.choice(["auto", "auto", "always", "20"])
        pair = make_pair(
            kept,
            page_size=page_size,
            window=window,
            host_pages=rng.choice([8, 64]),
            max_total_tokens=rng.choice([160, 256]),
            disaggregation_threshold=threshold,
            hicache_storage_prefetch_policy=rng.choice(["timeout", "wait_complete"]),
            here=rng.choice([0.0, 1.0, 5.0]),
            there=rng.choice([0.0, 20.0, 500.0]),
            lag_ms=rng.choice([0.0, 20.0]),
        )
        prompts = {}
        for turn in range(8):
            talk = rng.randrange(len(talks))
            rid = f"{life}.{turn}"
            prompts[rid] = list(talks[talk])
            pair.submit(rid, prompts[rid], 1 + turn, trusted=rng.random() < 0.8, max_new_tokens=rng.randint(1, 6))
            talks[talk] = (talks[talk] + reference_output(talks[talk], 5) + [rng.randrange(97)])[:90]
            for _ in range(rng.randint(0, 150)):
                rng.choice(pair.moves())()
            happens = rng.random()
            if happens < 0.1:
                pair.decode.scheduler.abort(AbortReq(rid, "test"))
                prompts.pop(rid)
            elif happens < 0.3 and kept:
                name = rng.choice(list(kept))
                kept[name] = kept[name][:-1] + bytes([kept[name][-1] ^ 1])
            elif happens < 0.4:
                pair.decode.store.dead = not pair.decode.store.dead
            elif happens < 0.5:
                pair.corrupt = not pair.corrupt  # what a prefill sends: then the prompt is computed here
        pair.decode.store.dead = pair.corrupt = False
        run_until_idle(pair, rng)
        for rid, prompt in prompts.items():
            assert pair.decode.tokens[rid] == reference_output(prompt, len(pair.decode.tokens[rid])), rid
            assert pair.decode.ends[rid].finish.type == "length", rid
        assert_all_returned(pair)
        came, tried = came + first_counts(pair)[0], tried + sum(first_counts(pair)[:3])
    return came, tried


def test_whatever_happens_the_tokens_are_the_same():
    came = tried = 0
    for seed in range(6):
        counts = attack(seed)
        came, tried = came + counts[0], tried + counts[1]
    assert came > 5
    assert tried > came


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whatever_happens_many_times():
    for seed in range(1000, 3000):
        attack(seed)


def _pages_count_though_they_were_not_copied(patch):
    load = KVTiers.load

    def forgetful(self, req, cached, host_pages, pool_pages, *, more=False):
        mark = self.copies.mark()
        load(self, req, cached, host_pages, pool_pages, more=more)
        if more:
            del self.copies._before[mark:]

    patch.setattr(KVTiers, "load", forgetful)


def _pages_count_before_they_are_here(patch):
    """Count as many pages as the store said that it has."""

    def hasty(self, receiver, now):
        tiers, req = self._scheduler.tiers, receiver.req
        req.computed += min(4, tiers.store.index.seen(req.rid)) * self._scheduler.memory.pool.page_size
        receiver.prefix_len = req.computed
        self._over(receiver)

    patch.setattr(StoreFirst, "_after_fetch", hasty)


def _one_page_too_many_is_loaded(patch):
    """Load the last page, too, which has to be computed: else nothing could be sampled."""
    load = KVMemory.load

    def greedy(self, req, found, *, more=False):
        load(self, req, found, more=more)
        req.computed += self.pool.page_size if more and found else 0

    patch.setattr(KVMemory, "load", greedy)


def _memory_of_the_room_is_given_back_while_it_waits(patch):
    look = StoreFirst.look

    def careless(self, receiver, now):
        look(self, receiver, now)
        if receiver.store is StoreStage.LOOKING and receiver.memory is not None:
            receiver.memory.hold.pins -= 1

    patch.setattr(StoreFirst, "look", careless)


MISTAKES = [
    _pages_count_though_they_were_not_copied,
    _pages_count_before_they_are_here,
    _one_page_too_many_is_loaded,
    _memory_of_the_room_is_given_back_while_it_waits,
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_found(monkeypatch, mistake):
    mistake(monkeypatch)

    def many() -> None:
        for seed in range(12, 60):  # a third of these find each of them
            attack(seed)

    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check finds it
        many()
