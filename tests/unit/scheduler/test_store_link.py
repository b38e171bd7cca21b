"""The scheduler's side of a store: answers that come late or twice, and what a turn costs while much is waited for."""

from __future__ import annotations

import itertools

import pytest
from support.sim import make_generate, make_options, reference_output
from support.sim_tiers import TieredSim

from pdserve.mem_cache.host_tier import HostTier
from pdserve.messages.tiers import (
    FetchPages,
    FindPages,
    KeepPages,
    PagesFetched,
    PagesFound,
    PagesKept,
    PagesStored,
    StorePages,
)
from pdserve.scheduler import store_backlog, store_link
from pdserve.scheduler.kept_pages import MOST_SECONDS, Kept, KeptPages
from pdserve.scheduler.store_backlog import STORE_BATCH
from pdserve.scheduler.store_index import LOOK_SECONDS
from pdserve.scheduler.store_link import LONGEST_WAIT, StoreLink
from pdserve.scheduler.tier_counts import TierCounts


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def make_link(host: HostTier, policy: str = "wait_complete") -> StoreLink:
    options = make_options(hicache_storage_prefetch_policy=policy)
    return StoreLink(options, host, TierCounts(), itertools.count(1), page_bytes=64)


def asked(link: StoreLink, now: float = 0.0) -> list:
    """Return the commands to the store in this tick."""
    return link.take(now)


def test_what_comes_too_late_for_its_request_is_kept_for_others():
    before = TieredSim(200)
    before.submit("first", list(range(40)), max_new_tokens=4)
    before.settle()
    sim = TieredSim(200, kept=dict(before.store.kept))
    sim.submit("late", list(range(40)), max_new_tokens=4)
    while "late" not in sim.ends:  # the store doesn't answer in time
        sim.plan()
        sim.work()
        sim.now += LONGEST_WAIT
    assert sim.ends["late"].meta.cached_tokens == 0
    free, used = sim.tiers.host.free_pages, len(sim.tiers.host)
    reserved = sim.tiers.host.reserved_pages
    assert reserved
    sim.settle()
    # It computed the same pages meanwhile, and these are there already; the others have gone back, once.
    assert sim.tiers.host.reserved_pages == 0
    assert sim.tiers.host.free_pages - free + len(sim.tiers.host) - used == reserved
    sim.scheduler.memory.flush()
    sim.submit("again", list(range(40)), max_new_tokens=4)
    sim.settle()
    assert sim.ends["again"].meta.cached_tokens == 36
    assert sim.tokens["again"] == reference_output(range(40), 4)


@pytest.mark.parametrize(
    ("compute_s", "answer_after", "is_used"),
    [
        pytest.param(5.4, 3.0, True, id="a prompt of 1,500 tokens on a busy machine"),
        pytest.param(5.4, 6.0, False, id="computing would have been sooner"),
        pytest.param(0.0, 0.1, False, id="not worth any wait"),
    ],
)
def test_a_fetch_is_waited_for_as_long_as_computing_would_take(compute_s, answer_after, is_used) -> None:
    before = TieredSim(200)
    before.submit("first", list(range(40)), max_new_tokens=4)
    before.settle()
    sim = TieredSim(200, kept=dict(before.store.kept), hicache_storage_prefetch_policy="auto")
    sim.compute_ms = compute_s * 1000
    sim.submit("r", list(range(40)), max_new_tokens=4)
    asked_at = sim.now
    while "r" not in sim.ends:
        sim.plan()
        sim.work()
        sim.now += 0.05
        if sim.now - asked_at >= answer_after:
            while sim.store_queue:
                sim.serve_store()
    assert sim.ends["r"].meta.cached_tokens == (36 if is_used else 0)
    assert sim.now - asked_at < min(compute_s, answer_after) + 1
    assert sim.tokens["r"] == reference_output(range(40), 4)
    sim.settle()


def test_a_fetch_that_takes_longer_than_computing_is_not_waited_for(monkeypatch) -> None:
    link = make_link(HostTier(64), "auto")
    monkeypatch.setattr(link.index, "ms", lambda pages, now: 2000.0)
    for rid, seconds, waits in (("short", 0.5, False), ("long", 30.0, True)):
        link.prefetch(rid, [name(ord(rid[0]) + i) for i in range(4)], 3.0, lambda tokens, s=seconds: s)
        assert link.must_wait(rid, 3.0) is waits


def test_an_earlier_attempts_answer_is_not_a_later_ones():
    """A request is aborted while the store looks for its pages, and another one comes under its name."""
    host = HostTier(64)
    link = make_link(host)
    link.prefetch("r", [name(i) for i in range(4)], 0.0)
    [first] = asked(link)
    link.forget("r")
    link.prefetch("r", [name(i) for i in range(10, 16)], 1.0)
    [second] = asked(link, 1.0)
    assert isinstance(first, FetchPages)
    assert isinstance(second, FetchPages)
    link.on_fetched(PagesFetched(first.id, 4, 0.1), 3.0)
    assert link.must_wait("r", 2.0)
    assert host.match([name(i) for i in range(4)])
    assert host.reserved_pages == 6
    link.on_fetched(PagesFetched(second.id, 2, 0.1), 3.0)
    assert not link.must_wait("r", 2.0)
    assert (len(host), host.reserved_pages, host.free_pages) == (6, 0, 58)
    host.check_invariants()


def test_what_was_found_bad_while_the_store_read_it_is_not_taken():
    host = HostTier(64)
    link = make_link(host)
    hashes = [name(i) for i in range(8)]
    link.prefetch("r", hashes, 0.0)
    [fetch] = asked(link)
    link.drop(hashes[3:5])
    link.on_fetched(PagesFetched(fetch.id, 8, 0.1), 3.0)
    assert len(host.match(hashes)) == len(host) == 3  # nor what begins with a bad page
    assert host.free_pages == 61
    host.check_invariants()


def test_a_request_that_finds_its_pages_bad_finds_them_once():
    """Two begin alike; the logits of the one are bad while the store still looks for the other's pages."""
    before = TieredSim(200)
    before.submit("first", list(range(40)), max_new_tokens=4)
    before.settle()
    sim = TieredSim(200, kept=dict(before.store.kept), hicache_storage_prefetch_policy="best_effort")
    original = sim.scheduler.on_step_result

    def spoil(result, now):
        result.bad_entries = [0]
        original(result, now)

    sim.scheduler.on_step_result = spoil
    sim.submit("bad", list(range(40)), max_new_tokens=4)
    while "bad" not in sim.ends:
        sim.plan()
        sim.work()
    sim.scheduler.on_step_result = original
    sim.settle()
    assert len(sim.tiers.host) == 0
    sim.submit("again", list(range(40)), max_new_tokens=4)
    sim.settle()
    assert sim.ends["again"].meta.cached_tokens == 0


def test_a_loop_sleeps_until_the_next_fetch_has_taken_too_long_and_no_longer():
    host = HostTier(1000)
    link = make_link(host)
    for i in range(5):
        link.prefetch(f"r{i}", [name(100 * i + j) for j in range(4)], float(i))
    fetches = asked(link, 4.0)
    assert link.timeout(4.0) == LONGEST_WAIT - 4
    link.on_fetched(PagesFetched(fetches[0].id, 4, 0.1), 5.0)
    assert link.timeout(5.0) == LONGEST_WAIT + 1 - 5
    assert link.problem(5.0) == ""
    assert "has not answered for 20 s" in link.problem(21.0)
    for fetch in fetches[1:]:
        link.on_fetched(PagesFetched(fetch.id, 0, 0.1), 3.0)
    assert link.timeout(6.0) is None
    assert (host.reserved_pages, len(host), host.free_pages) == (0, 4, 996)


def test_and_until_the_next_look_has():
    link = make_link(HostTier(1000))
    for i in range(4):
        link.look(f"r{i}", [name(100 * i + j) for j in range(4)], i / 100)
    looks = asked(link, 0.1)
    assert all(isinstance(look, FindPages) for look in looks)
    link.forget("r0")
    link.index.on_found(PagesFound(looks[1].id, 4))
    assert link.timeout(0.1) == pytest.approx(LOOK_SECONDS + 0.02 - 0.1)
    asked(link, LOOK_SECONDS + 0.02)
    assert link.timeout(LOOK_SECONDS + 0.02) == pytest.approx(0.01)
    asked(link, LOOK_SECONDS + 0.03)
    assert link.timeout(LOOK_SECONDS + 0.03) is None
    assert "has not answered for 20 s" in link.problem(20.0)
    for look in (looks[0], *looks[2:]):
        link.index.on_found(PagesFound(look.id, 0))
    assert link.problem(30.0) == ""


def test_how_long_a_fetch_takes_is_learned_from_when_it_was_asked_for():
    link = make_link(HostTier(1000))
    for now in range(1000, 1200, 4):
        link.prefetch("r", [name(now + j) for j in range(4)], float(now))
        [fetch] = asked(link, float(now))
        link.on_fetched(PagesFetched(fetch.id, 4, 0.1), now + 2.0)
    assert 1000 < link.fetch_ms(4, 1200.0) < 2000  # 2000, drawn to what is usual


# --- what is kept for somebody ---


class Saving:
    """What is on its way, and how often that was asked about."""

    def __init__(self, *hashes: bytes) -> None:
        self.hashes, self.looks, self.commands, self.again = set(hashes), 0, [], []

    def is_saving(self, page_hash: bytes) -> bool:
        self.looks += 1
        return page_hash in self.hashes

    def save_again(self, hashes) -> None:
        self.again += hashes
        self.hashes |= set(hashes)

    def tell_store(self, message: KeepPages) -> None:
        self.commands.append(message)

    def problem(self, now: float) -> str:
        return "it is dead"


def wish(kept: KeptPages, hashes: list[bytes], now: float = 0.0) -> list[Kept]:
    outcomes: list[Kept] = []
    kept.want(hashes, 100.0, now, outcomes.append)
    return outcomes


def test_a_turn_costs_nothing_while_nothing_is_due():
    tiers = Saving(*(name(i) for i in range(1000)))
    kept = KeptPages(tiers, tiers, itertools.count(1).__next__)
    answers = [wish(kept, [name(i + j) for j in range(100)]) for i in range(900)]
    tiers.looks = 0
    for _ in range(100):
        kept.advance(1.0)
        assert kept.timeout(1.0) == MOST_SECONDS - 1
    assert (tiers.looks, tiers.commands) == (0, [])
    for i in range(1000):
        tiers.hashes.discard(name(i))
        kept.left([name(i)])
    kept.advance(2.0)
    assert len(tiers.commands) == 900
    assert tiers.looks <= 900 * 100 + 900 * 100  # once for each page of each, and once more for what it waited for
    for message in tiers.commands:
        kept.on_kept(PagesKept(message.id, 100))
    assert answers == [[Kept(100)]] * 900


def test_orders_end_once_and_nothing_is_left_of_them():
    tiers = Saving(name(0))
    kept = KeptPages(tiers, tiers, itertools.count(1).__next__)
    saving, keeping = wish(kept, [name(0), name(1)]), wish(kept, [name(1)], 1.0)
    kept.advance(1.0)
    [asked_for] = tiers.commands
    kept.advance(MOST_SECONDS + 0.5)
    assert [one.problem for one in saving] == [
        f"the KV store did not take the pages within {MOST_SECONDS:.0f} s; it is dead"
    ]
    assert keeping == []
    kept.advance(MOST_SECONDS + 1.5)
    assert len(keeping) == 1
    kept.on_kept(PagesKept(asked_for.id, 1))  # too late
    kept.left([name(0)])
    kept.advance(50.0)
    assert (len(saving), len(keeping), len(tiers.commands)) == (1, 1, 1)
    assert kept.timeout(50.0) is None
    assert (len(kept._orders), kept._saving, kept._ready, kept._keeping) == (0, {}, [], {})


def test_what_the_store_lacks_is_sent_once_more_and_waited_for():
    tiers = Saving()
    kept = KeptPages(tiers, tiers, itertools.count(1).__next__)
    outcomes = wish(kept, [name(i) for i in range(4)])
    kept.advance(0.0)
    kept.on_kept(PagesKept(tiers.commands[0].id, 1))
    assert tiers.again == [name(1), name(2), name(3)]
    kept.advance(1.0)
    assert len(tiers.commands) == 1
    tiers.hashes.clear()
    kept.left([name(1)])
    kept.advance(2.0)
    kept.on_kept(PagesKept(tiers.commands[1].id, 3))
    assert outcomes == [Kept(3, "host memory or the KV store has no room")]


@pytest.mark.parametrize("how", ["stored", "dropped", "skipped", "forgotten", "evicted"])
def test_a_page_leaves_the_way_to_the_store_however_it_does(how: str, monkeypatch):
    monkeypatch.setattr(store_backlog, "BACKLOG_PAGES", 3)
    host = HostTier(8)
    link = make_link(host)
    host.keep(name(0))
    link.backlog.remember(name(0))
    outcomes: list[Kept] = []
    link.kept.want([name(0)], 100.0, 0.0, outcomes.append)
    if how == "dropped":
        link.drop([name(0)])
    elif how == "skipped":
        for i in range(1, 4):
            host.keep(name(i))
            link.backlog.remember(name(i))
    elif how == "forgotten":
        link.backlog.clear()
    elif how == "evicted":
        host.drop([name(0)])
    else:
        [store] = [message for message in asked(link) if isinstance(message, StorePages)]
        assert not [message for message in asked(link) if isinstance(message, KeepPages)]
        link.backlog.on_stored(PagesStored(store.id, 1, 0.1, ""), 0.0)
    [keep] = [message for message in asked(link, 0.5) if isinstance(message, KeepPages)]
    link.kept.on_kept(PagesKept(keep.id, 1))
    assert outcomes == [Kept(1)]


def test_a_batch_that_failed_is_still_on_its_way():
    host = HostTier(2 * STORE_BATCH)
    link = make_link(host)
    hashes = [name(i) for i in range(STORE_BATCH + 3)]
    for page_hash in hashes:
        host.keep(page_hash)
        link.backlog.remember(page_hash)
    outcomes: list[Kept] = []
    link.kept.want(hashes, 100.0, 0.0, outcomes.append)
    [store] = asked(link)
    link.backlog.on_stored(PagesStored(store.id, 0, 0.1, "the disk is full"), 0.0)
    assert asked(link, 0.5) == []
    again = []
    for now in (10.0, 11.0):
        again += asked(link, now)
        link.backlog.on_stored(PagesStored(again[-1].id, 1, 0.1, ""), now)
    [keep] = asked(link, 12.0)
    assert isinstance(keep, KeepPages)
    assert all(isinstance(message, StorePages) for message in again)


def test_a_store_that_fails_in_its_own_way_is_one_that_fails(caplog):
    """On an unexpected error each command is answered all the same, and its pages come back."""
    before = TieredSim(200)
    before.submit("first", list(range(40)), max_new_tokens=4)
    before.settle()
    sim = TieredSim(200, kept=dict(before.store.kept))

    def broken(*args):
        raise KeyError("surprise")

    sim.store.get = sim.store.set = broken
    sim.submit("again", list(range(40)), max_new_tokens=4)
    sim.settle()
    assert sim.tokens["again"] == reference_output(range(40), 4)
    assert (sim.tiers.host.reserved_pages, sim.tiers.info()["backlog"] > 0) == (0, True)
    assert "none of its own" in caplog.text
    del sim.store.get, sim.store.set
    sim.now += 60
    sim.submit("later", list(range(50, 90)), max_new_tokens=4)
    sim.settle()
    assert sim.tiers.info()["backlog"] == 0


def test_no_request_waits_for_a_store_that_was_not_asked():
    sim = TieredSim(8, kept={})
    msg = make_generate("r", list(range(40)), max_new_tokens=4)
    sim.scheduler.arrivals.admit(msg, sim.now)
    assert sim.tiers.host.reserved_pages <= 4  # half of them, at most
    sim.settle()
    assert sim.tokens["r"] == reference_output(range(40), 4)
