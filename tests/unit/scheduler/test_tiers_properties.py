"""Pool, tree, tiers and the real scheduler under random operations: every token is right, and every page has an owner.

``make test`` takes a few thousand steps, ``make test-slow`` 200,000 (``PDSERVE_TIER_STEPS``). Each mistake of
``MISTAKES`` is made on purpose, to see it found.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.examples import examples
from support.radix_nodes import require_true_names
from support.sim import NO_WINDOW, SimWindow, reference_output
from support.sim_resize import ResizedTieredSim

from pdserve.mem_cache.host_tier import HostTier
from pdserve.mem_cache.pool_end import PoolEnd
from pdserve.messages.memory import ResizeReq, ResizeResult
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.sessions import ResumeReq, SessionState, SnapshotReq, SnapshotResult
from pdserve.messages.tiers import PageCopy
from pdserve.model_runner.tiers.host_pool import HostPool
from pdserve.scheduler import store_link
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.pool_copies import PoolCopies
from pdserve.scheduler.step_builder import RowUpdates
from pdserve.scheduler.store_link import StoreLink
from pdserve.scheduler.tiers import KVTiers

CAMPAIGN_STEPS = int(os.environ.get("PDSERVE_TIER_STEPS", "200000"))
STEPS = 60
USUAL_STEPS = 25
"""Usual number of steps of an instance. Many are shorter."""
POLICIES = ("write_through", "write_through_selective", "write_back")
SIZES = (112, 128, 176, 256)
"""Sizes of the pool in tokens: what the longest request needs, and more."""
PATIENCE = ("best_effort", "wait_complete", "timeout")


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


class Tiers(RuleBasedStateMachine):
    """One instance after another over one store."""

    only_windows = False
    """Whether every instance has layers with windows: mistakes with these show too rarely else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.meant: dict[str, tuple[list[int], int]] = {}
        """All that this instance was asked."""
        self.snapshots: dict[int, tuple[list[int], int]] = {}
        self.saved: list[tuple[SessionState, tuple[list[int], int]]] = []
        self.count = 0

    @initialize(
        page_size=st.sampled_from((1, 4, 16)),
        host_pages=st.sampled_from((2, 16, 200)),
        policy=st.sampled_from(POLICIES),
        patience=st.sampled_from(PATIENCE),
        store=st.booleans(),
        windowed=st.booleans(),
        most_load=st.sampled_from((1, 2, 1000)),
    )
    def start(self, page_size, host_pages, policy, patience, store, windowed, most_load):
        """Start an instance with these options. Windows of 16 tokens go with write_through alone."""
        if self.only_windows:
            policy, windowed = "write_through", True
        self.window = SimWindow(16, 64) if windowed and policy == "write_through" else NO_WINDOW
        self.options = {
            "page_size": page_size,
            "max_total_tokens": 128,
            "max_total_tokens_limit": max(SIZES),
            "chunked_prefill_size": 16,
            "hicache_write_policy": policy,
            "hicache_storage_prefetch_policy": patience,
            "kv_debug": host_pages != 16,
        }
        self.host_pages, self.has_store, self.most_load = host_pages, store, most_load
        self.begin(None)

    def begin(self, kept):
        self.sim = ResizedTieredSim(self.host_pages, kept, self.has_store, self.window, **self.options)
        # As if the streams beside left room for this many pages a step.
        self.sim.tiers.copies.pace.take = lambda pages, parts: min(pages, self.most_load)

    @rule(
        family=st.integers(0, 3),
        length=st.sampled_from((1, 7, 20, 33, 40, 60)),
        own=st.integers(0, 3),
        output=st.integers(1, 24),
    )
    def submit(self, family, length, own, output):
        """Submit a prompt of a family that shares its beginning; in one family all pages look alike.

        Some continue an answer.
        """
        tokens = [(i * 7 + family * 31) % 97 if family < 3 else 5 for i in range(length)] + [own] * own
        if own == 3:
            tokens += reference_output(tokens, 9)
        rid = f"r{self.count}"
        self.count += 1
        self.asked[rid] = self.meant[rid] = (tokens, output)
        self.sim.submit(rid, tokens, max_new_tokens=output)

    @rule()
    def settle(self):
        self.sim.settle()

    @rule(turns=st.integers(1, 20))
    def turn(self, turns):
        for _ in range(turns):
            self.sim.plan()
            self.sim.work()

    @rule()
    def work(self):
        self.sim.work()

    @rule(seconds=st.sampled_from((0.1, 1.0, 20.0)))
    def pass_time(self, seconds):
        self.sim.now += seconds

    @rule(tokens=st.sampled_from(SIZES), wait_s=st.sampled_from((0.0, 0.005, 100.0)), busy=st.sampled_from((0, 0, 5)))
    def resize(self, tokens, wait_s, busy):
        """Resize the pool while ``busy`` requests more than before have pages near its end."""
        for i in range(busy):
            self.submit(i % 3, 60, self.count % 3, 24)
        self.turn(3 * busy)
        self.sim.ask(ResizeReq(tokens, wait_s, id=1))

    @rule(times=st.integers(1, 6))
    def serve_store(self, times):
        for _ in range(times):
            self.sim.serve_store()

    @precondition(lambda self: self.sim.scheduler.reqs)
    @rule(data=st.data())
    def abort(self, data):
        from pdserve.messages.requests import AbortReq

        rid = data.draw(st.sampled_from(sorted(self.sim.scheduler.reqs)))
        self.asked.pop(rid)
        self.sim.scheduler.abort(AbortReq(rid, "test"))

    @precondition(lambda self: self.meant)
    @rule(data=st.data(), turns=st.sampled_from((0, 3, 9)), with_output=st.booleans())
    def snapshot(self, data, turns, with_output):
        """Ask for a snapshot of a request that runs or has ended."""
        self.turn(turns)
        rid = data.draw(st.sampled_from(list(self.meant)[-4:]))
        self.count += 1
        self.snapshots[self.count] = self.meant[rid]
        self.sim.tell(SnapshotReq(rid, with_output, 1e10, id=self.count))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def resume(self, data):
        """Resume a session. Sessions outlive restarts, whatever became of their pages."""
        state, meant = data.draw(st.sampled_from(self.saved))
        rid = f"r{self.count}"
        self.count += 1
        self.asked[rid] = self.meant[rid] = meant
        request = msgspec.structs.replace(state.running.request, rid=rid, arrival=self.sim.now)
        running = msgspec.structs.replace(state.running, request=request)
        self.sim.tell(ResumeReq(msgspec.structs.replace(state, running=running)))

    @precondition(lambda self: self.sim.store.kept)
    @rule(data=st.data(), kind=st.sampled_from(("flip", "flip all", "cut", "swap", "lose")))
    def spoil(self, data, kind):
        kept = self.sim.store.kept
        names = sorted(kept)
        name = data.draw(st.sampled_from(names))
        if kind == "flip":
            at = data.draw(st.integers(0, len(kept[name]) - 1))
            kept[name] = kept[name][:at] + bytes([kept[name][at] ^ 0x40]) + kept[name][at + 1 :]
        elif kind == "flip all":
            kept |= {name: framed[:-1] + bytes([framed[-1] ^ 1]) for name, framed in kept.items()}
        elif kind == "cut":
            kept[name] = kept[name][:-1]
        elif kind == "swap":
            kept[name] = kept[names[0]]
        else:
            del kept[name]

    @rule(what=st.sampled_from(("flush", "dies", "lives", "lives", "restart")))
    def happen(self, what):
        """Restart: what the store was told before is lost, and so are pool and host."""
        if what == "flush":
            self.sim.scheduler.memory.flush()
        elif what == "restart":
            self.check_answers()
            kept = self.sim.store.kept
            self.asked.clear()
            self.meant.clear()
            self.begin(kept)
        else:
            self.sim.store.dead = what == "dies"

    @invariant()
    def is_whole(self):
        if hasattr(self, "sim"):
            self.sim.scheduler.check_invariants()
            require_true_names(self.sim.scheduler.memory.pool.cache)
            self.check_answers()
            debug = self.sim.scheduler.memory.debug
            assert not debug.enabled or not sum(debug.mismatches.values()), debug.info()

    def check_answers(self):
        for said in self.sim.answers:
            if isinstance(said, ResizeResult | RefusedAnswer):
                continue
            assert isinstance(said, SnapshotResult)
            if said.state.is_open:
                self.saved.append((said.state, self.snapshots[said.id]))
        self.sim.answers.clear()
        for rid in [rid for rid in self.asked if rid in self.sim.ends]:
            tokens, output = self.asked.pop(rid)
            assert self.sim.tokens[rid] == reference_output(tokens, output), (rid, self.sim.ends[rid])

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.settle()
            self.is_whole()
            assert not self.asked
            assert not self.sim.tiers.store or not self.sim.tiers.store.fetching


def attack(examples: int, *, shrink: bool = True) -> None:
    """Run random instances with ``STEPS`` steps each."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    config = settings(
        max_examples=examples, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks, phases=phases
    )
    run_state_machine_as_test(Tiers, settings=settings(config, print_blob=False, derandomize=True, database=None))


def test_every_token_is_right_and_every_page_has_an_owner():
    attack(examples(40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_campaign():
    attack(CAMPAIGN_STEPS // USUAL_STEPS)


def _copies_that_come_late(patch):
    """Copy what the pool gives up after the step that overwrites it."""
    patch.setattr(PoolCopies, "take_before", lambda self: [])


def _pages_that_are_overwritten_while_they_are_read(patch):
    patch.setattr(HostTier, "pin", lambda self, pages: None)
    patch.setattr(HostTier, "unpin", lambda self, pages: None)


def _pages_that_count_as_fetched_before_they_are(patch):
    settle = HostTier.settle
    patch.setattr(HostTier, "settle", lambda self, pages, hashes: settle(self, pages, self._asked[tuple(pages)]))
    reserve = StoreLink.prefetch

    def prefetch(self, rid, hashes, now):
        reserve(self, rid, hashes, now)
        self._host._asked = {tuple(f.pages): f.hashes for f in self._fetches.values()}

    patch.setattr(StoreLink, "prefetch", prefetch)


def _a_step_too_little_in_a_hash(patch):
    """Name pages by their own tokens alone."""
    import pdserve.mem_cache.page_hash as page_hash

    def chain(before, key, page_size):
        step = page_size * 4
        return [page_hash.blake2b(key[at : at + step], digest_size=16).digest() for at in range(0, len(key), step)]

    patch.setattr(page_hash, "chain", chain)
    patch.setattr("pdserve.mem_cache.radix_cache.chain", chain)


def _loads_of_the_wrong_page(patch):
    load = KVTiers.load
    patch.setattr(KVTiers, "load", lambda self, req, at, host, *to, **how: load(self, req, at, host[::-1], *to, **how))


def _prefixes_that_count_as_loaded_before_they_are(patch):
    """Take all that host memory has of a request for what a step has copied of it."""

    def load(self, req, found, *, more=False):
        load_all(self, req, found, more=more)
        if req.loading is not None:
            req.computed, req.loading = req.loading.until, None

    load_all = KVMemory.load
    patch.setattr(KVMemory, "load", load)


def _rows_without_what_is_loaded_later(patch):
    take_row = RowUpdates.add
    patch.setattr(RowUpdates, "add", lambda self, req, mapped: take_row(self, req, req.computed))


def _a_page_that_is_never_given_back(patch):
    patch.setattr(HostTier, "_let_go", lambda self, page: None)


def _copies_from_the_pages_before(patch):
    """Name evicted pages after their neighbours."""
    leaving = KVTiers.leaving
    patch.setattr(KVTiers, "leaving", lambda self, hashes, pages: leaving(self, hashes, pages - 1))


def _windows_that_are_not_loaded(patch):
    copy = HostPool.copy
    kept = [PageCopy.TO_HOST, PageCopy.TO_POOL, PageCopy.WINDOW_TO_HOST]
    patch.setattr(HostPool, "copy", lambda self, pools, c: copy(self, pools, c[np.isin(c[:, 0], kept)]))


def _pages_saved_without_their_window(patch):
    """Save host pages with whatever lay before the window of their last owner."""

    def window_pages(self, pages):
        found = self._windows.behind(pages)
        return [w or None for w in found[0]] if found else [None] * len(pages)

    patch.setattr(KVTiers, "_window_pages", window_pages)


def _snapshots_of_pages_that_are_anothers(patch):
    pages = KVMemory.pages_with_kv
    patch.setattr(KVMemory, "pages_with_kv", lambda self, *what: pages(self, *what)[::-1].copy())


def _memory_goes_while_requests_use_it(patch):
    """Let a smaller pool be there at once, even if pages beyond its end are in use."""
    patch.setattr(PoolEnd, "beyond", property(lambda self: 0))


MISTAKES = [
    _memory_goes_while_requests_use_it,
    _snapshots_of_pages_that_are_anothers,
    _windows_that_are_not_loaded,
    _pages_saved_without_their_window,
    _copies_that_come_late,
    _pages_that_are_overwritten_while_they_are_read,
    _pages_that_count_as_fetched_before_they_are,
    _a_step_too_little_in_a_hash,
    _loads_of_the_wrong_page,
    _prefixes_that_count_as_loaded_before_they_are,
    _rows_without_what_is_loaded_later,
    _a_page_that_is_never_given_back,
    _copies_from_the_pages_before,
]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_found(monkeypatch, mistake):
    monkeypatch.setattr(Tiers, "only_windows", "window" in mistake.__name__)
    mistake(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check finds it
        attack(1000, shrink=False)
