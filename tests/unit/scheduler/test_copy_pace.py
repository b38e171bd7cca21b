"""Loading from host memory, in pieces that streams have room for. It counts in estimates."""

from __future__ import annotations

import pytest
from support.sim import make_generate, reference_output
from support.sim_machine import Machine, TimedSim
from support.sim_tiers import Tiered

from pdserve.messages.base import unpack_i32
from pdserve.messages.requests import AbortReq
from pdserve.messages.tiers import CopyPages, PagesCopied
from pdserve.scheduler.copy_pace import LEAST_LOAD_MS, CopyPace
from pdserve.scheduler.itl_budget import FIRST_MARGIN

MACHINE = Machine(15.0, 0.3, kv_token_ms=0.0005)
PROMPT = [i % 90 for i in range(3200)]
PAGES = 200
TAIL = [5] * 120
COPY_MS = 2.0
"""Milliseconds of a page. Loading the prompt at once would take ten times the ITL budget."""
BUDGET_MS = 40.0


class CopyingSim(Tiered, TimedSim):
    """Copies take their time. ``results``: when steps were done."""

    def __init__(self, **options) -> None:
        super().__init__(MACHINE, host_pages=512, enable_hierarchical_cache=True, **options)
        self.add_tiers(512, None)
        self.results: list[float] = []

    def work(self) -> bool:
        """See ``TimedSim``."""
        if self.to_worker.messages and isinstance(self.to_worker.messages[0], CopyPages):
            message = self.to_worker.messages.popleft()
            copies = unpack_i32(message.copies).reshape(-1, 3)
            self.host.copy(self.pools, copies)
            seconds = len(copies) * COPY_MS / 1000
            self.now += seconds
            self.tiers.on_event(PagesCopied(message.id, seconds), self.now)
            return True
        worked = super().work()
        if worked:
            self.results.append(self.now)
        return worked

    def remember(self) -> None:
        """Put the prompt's KV into host memory, and not in the pool."""
        self.submit("before", PROMPT, max_new_tokens=1)
        self.run_until_idle()
        self.scheduler.memory.empty()

    def stream(self, count: int = 4) -> None:
        """Let ``count`` requests decode."""
        for i in range(count):
            self.submit(f"s{i}", [i, 1, 2], max_new_tokens=300)
        self.run_until(lambda: all(f"s{i}" in self.tokens for i in range(count)))

    def between(self, since: int) -> list[float]:
        """Return the milliseconds between the results of steps, from that of number ``since`` on."""
        return [(b - a) * 1000 for a, b in zip(self.results[since:], self.results[since + 1 :], strict=False)]


@pytest.fixture
def sim() -> CopyingSim:
    sim = CopyingSim()
    sim.remember()
    return sim


def load_with_streams(sim: CopyingSim) -> int:
    """Submit the prompt again, beside streams, until some of it is loaded. Returns the number of the step before."""
    sim.stream()
    since = len(sim.results) - 1
    sim.submit("long", [*PROMPT, *TAIL], max_new_tokens=4)
    sim.run_until(lambda: sim.scheduler.reqs["long"].computed > 0)
    assert sim.scheduler.reqs["long"].loading is not None
    return since


def test_streams_keep_their_budget_beside_a_long_load(sim: CopyingSim, monkeypatch) -> None:
    overheads: list[float] = []
    monkeypatch.setattr(sim.scheduler.estimator.model, "learn_overhead", overheads.append)
    since = load_with_streams(sim)
    while "long" not in sim.tokens:
        req = sim.scheduler.reqs["long"]
        assert req.loading is None or req.to_compute == len(TAIL)  # what its estimate counts
        sim.plan()
        sim.work()
    assert max(sim.between(since)) <= BUDGET_MS
    assert max(overheads) < 1  # copies are no part of them
    # It has most of what the streams leave: 400 ms of copies in as many milliseconds of room.
    assert len(sim.between(since)) < PAGES * COPY_MS / (BUDGET_MS / 1.25 - 15) + 5
    sim.run_until_idle()
    assert sim.tokens["long"] == reference_output([*PROMPT, *TAIL], 4)
    meta = sim.ends["long"].meta
    assert (meta.cached_tokens, meta.cached_beyond.host) == (len(PROMPT), len(PROMPT))
    assert sim.scheduler.planner.hit_tokens == len(PROMPT)
    assert sim.scheduler.planner.budget.itl.info()["steps_over"] == 0


def test_where_no_stream_waits_all_is_loaded_at_once(sim: CopyingSim) -> None:
    sim.submit("long", [*PROMPT, *TAIL], max_new_tokens=1)
    sim.plan()
    assert sim.scheduler.reqs["long"].computed >= len(PROMPT)


def test_what_host_memory_has_lost_meanwhile_is_computed(sim: CopyingSim) -> None:
    load_with_streams(sim)
    req = sim.scheduler.reqs["long"]
    sim.tiers.flush()
    loaded = req.computed
    sim.run_until_idle()
    assert loaded < len(PROMPT)
    assert sim.tokens["long"] == reference_output([*PROMPT, *TAIL], 4)
    assert sim.ends["long"].meta.cached_tokens == loaded


def test_a_request_that_ends_in_the_middle_leaves_what_is_loaded(sim: CopyingSim) -> None:
    load_with_streams(sim)
    req = sim.scheduler.reqs["long"]
    loaded = req.computed
    sim.scheduler.abort(AbortReq("long"))
    assert req.loading is None
    assert sim.scheduler.memory.prefix_len(req_like(sim)) == loaded
    sim.submit("again", [*PROMPT, 8], max_new_tokens=4)
    sim.run_until_idle()
    sim.scheduler.check_invariants()
    assert sim.tokens["again"] == reference_output([*PROMPT, 8], 4)


def req_like(sim: CopyingSim):
    """Return a request with the prompt that has nothing yet."""
    sim.scheduler.draining = False
    sim.scheduler.arrivals.admit(make_generate("probe", [*PROMPT, 9], max_new_tokens=1), sim.now)
    req = sim.scheduler.reqs["probe"]
    sim.scheduler.abort(AbortReq("probe"))
    return req


def test_a_short_load_and_a_piece_share_the_room_of_a_step() -> None:
    sim = CopyingSim()
    prompt = PROMPT[: 8 * 16]
    sim.submit("before", prompt, max_new_tokens=1)
    sim.run_until_idle()
    sim.scheduler.memory.empty()
    sim.stream()
    since = len(sim.results) - 1
    sim.submit("more", [*prompt, *[7] * 200], max_new_tokens=2)
    sim.run_until(lambda: "more" in sim.tokens)
    assert max(sim.between(since)) <= BUDGET_MS
    itl = sim.scheduler.planner.budget.itl
    assert (itl.info()["steps_over"], itl.margin <= FIRST_MARGIN) == (0, True)


def test_copies_that_were_sent_before_leave_less_room_for_loads(sim: CopyingSim) -> None:
    """The copies are of pages that the step before has computed."""
    sim.stream()
    sim.submit("new", [7, *range(80)], max_new_tokens=2)
    sim.plan()
    assert sim.scheduler.reqs["new"].computed == 81
    since = len(sim.results) - 1
    sim.submit("long", [*PROMPT, *TAIL], max_new_tokens=4)
    sim.run_until(lambda: "long" in sim.tokens)
    assert max(sim.between(since)) <= BUDGET_MS


def test_what_a_request_had_before_is_no_hit(sim: CopyingSim) -> None:
    """It was retracted, say."""
    sim.stream()
    sim.submit("long", [*PROMPT, *TAIL], max_new_tokens=1)
    sim.scheduler.reqs["long"].times.admitted = sim.now
    hits = sim.scheduler.planner.hit_tokens
    sim.run_until(lambda: "long" in sim.tokens)
    assert sim.ends["long"].meta.cached_tokens == 0
    assert (sim.scheduler.planner.hit_tokens, sim.tiers.counts.loaded) == (hits, PAGES)


def test_what_is_loaded_later_is_not_charged_either(monkeypatch) -> None:
    sim = CopyingSim(fair_scheduling=True)
    sim.remember()
    sim.stream()
    charged = []
    monkeypatch.setattr(sim.scheduler.planner.waiting.shares, "prompt", lambda tenant, tokens: charged.append(tokens))
    sim.submit("long", [*PROMPT, *TAIL], max_new_tokens=1)
    sim.run_until(lambda: "long" in sim.tokens)
    assert charged == [len(TAIL)]


def test_the_pace_is_learned_and_bounds_a_load() -> None:
    pace = CopyPace(1 << 20)
    assert pace.part_ms == pytest.approx(0.524, abs=0.01)
    for number in range(1, 60, 2):
        pace.sent(number, 10)
        pace.sent(number + 1, 30)
        pace.learn(number, 0.02)
        pace.learn(number + 1, 0.06)
    assert pace.part_ms == pytest.approx(2.0, rel=0.01)
    assert pace.take(1000, 1) == 1000  # no waiting request is known
    pace.limit_loads(21.0)
    assert [pace.take(7, 1), pace.take(100, 1), pace.take(100, 1)] == [7, 3, 1]
    assert pace.take(100, 1) == 0
    pace.limit_loads(21.0)
    assert pace.take(100, 2) == 5
    pace.limit_loads(-3.0)
    assert [pace.take(100, 1), pace.take(100, 1)] == [max(1, int(LEAST_LOAD_MS / 2)), 0]
    assert pace.new_ms(70) == pytest.approx(140, rel=0.01)
    assert pace.new_ms(75) == pytest.approx(10, rel=0.01)
