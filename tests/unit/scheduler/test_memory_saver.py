"""When memory may be given back: what runs goes on, what comes is refused, what is cached is saved or forgotten."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.scrape import page_of
from support.sim import SimInstance, make_generate, make_options, reference_output
from support.sim_tiers import TieredSim

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.memory import MemoryChanged, MemoryReq, MemoryResult, ReleaseMemory, ResumeMemory, Unreleasable
from pdserve.messages.moves import RunningRequest
from pdserve.messages.outputs import ReqError
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.sessions import ResumeReq, SessionState
from pdserve.messages.tiers import CopyPages
from pdserve.scheduler.features.memory_saver import PARTING_SECONDS, MemorySaver, MemoryState
from pdserve.scheduler.features.metrics_report import MetricsReport
from pdserve.scheduler.features.pressure import Pressure, PressureMeter, pressure, share_left
from pdserve.scheduler.handlers import Handlers


class Peers:
    """The peers as the memory saver sees them."""

    def __init__(self) -> None:
        self.closed = False
        self.is_closed = False
        self.memory: list[object] = []
        self.membership = self

    def pinned(self) -> list[object]:
        return self.memory

    def close(self, reason: str) -> None:
        self.closed = True

    def open(self) -> None:
        self.closed = self.is_closed = False


class Rig:
    """An instance with a worker that carries out a command when the test calls ``obey``."""

    def __init__(self, sim: SimInstance | None = None) -> None:
        self.sim = sim or SimInstance()
        self.scheduler = self.sim.scheduler
        self.occupation = MemorySaver(self.scheduler)
        self.commands: list[ReleaseMemory | ResumeMemory] = []
        self.released: list[Any] = []

    def ask(self, release: bool, *tags: Any, wait_s: float = 0.0) -> Any:
        question = MemoryReq(release, list(tags), wait_s, id=7)
        Handlers(self.sim.outbox, self.occupation).handle(question, self.sim.now)
        return self.answer()

    def problem(self) -> str | None:
        """Return why nothing is computed."""
        return self.occupation.problem(self.sim.now)

    def answer(self) -> Any:
        """Flushes; what HTTP was told of memory, and what the worker was."""
        self.sim.outbox.flush()
        answered = [m for m in self.sim.to_detokenizer.messages if isinstance(m, MemoryResult | RefusedAnswer)]
        self.sim.to_detokenizer.messages.clear()
        assert len(answered) <= 1
        return answered[0] if answered else None

    def obey(self, error: str = "") -> Any:
        """Let the worker do what is left for it to do; the last command is about memory."""
        self.sim.outbox.flush()
        while len(self.sim.to_worker.messages) > 1:
            self.sim.work()
        command = self.sim.to_worker.messages.popleft()
        assert isinstance(command, ReleaseMemory | ResumeMemory)
        if not error:
            gone = set(self.released) | set(command.tags)
            self.released = sorted(
                gone if isinstance(command, ReleaseMemory) else set(self.released) - set(command.tags)
            )
        self.occupation.on_changed(MemoryChanged(self.released, 9, 0.5, error), self.sim.now)
        result = self.answer()
        assert result is not None
        return result


def test_an_idle_instance_gives_all_back_and_takes_it_again() -> None:
    rig = Rig()
    assert rig.problem() is None
    assert rig.ask(True) is None
    assert rig.occupation.state is MemoryState.RELEASING
    assert rig.obey() == MemoryResult(["kv_cache", "weights"], 9, 0.5, id=7)
    assert rig.problem() == ("memory was given back (kv_cache, weights); POST /resume_memory_occupation takes it again")
    assert rig.ask(False) is None
    assert rig.obey().released == []
    assert (rig.problem(), rig.occupation.state) == (None, MemoryState.HELD)
    rig.sim.submit("a", range(20), max_new_tokens=5)
    rig.sim.run_until_idle()
    assert rig.sim.tokens["a"] == reference_output(range(20), 5)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ((False, "kv_cache"), "kv_cache was not given back"),
        ((False,), "all memory was not given back"),
        ((True, "weights", "weights"), None),
    ],
)
def test_the_wrong_order_is_refused(order: tuple, says: str | None) -> None:
    rig = Rig()
    result = rig.ask(*order)
    if says is not None:
        assert result is not None
        assert (result.status, result.text[: len(says)]) == (409, says)
        assert not rig.sim.to_worker.messages
        return
    # A tag that is named twice is one; and while it is under way, everything else is refused.
    [command] = rig.sim.to_worker.messages
    assert command == ReleaseMemory(["weights"])
    for release in (True, False):
        result = rig.ask(release, "kv_cache")
        assert result is not None
        assert (result.status, "releasing just now" in result.text) == (409, True)
    rig.obey()
    result = rig.ask(True, "kv_cache", "weights")
    assert result is not None
    assert result.text.startswith("weights was given back already")
    # Without tags, what is left.
    rig.ask(True)
    assert list(rig.sim.to_worker.messages) == [ReleaseMemory(["kv_cache"])]
    rig.obey()
    rig.ask(False, "weights")
    assert rig.obey().released == ["kv_cache"]
    assert rig.problem() is not None
    assert "(kv_cache)" in rig.problem()


def test_no_request_comes_in_by_another_way() -> None:
    """Sessions that go on, and requests that move here, are requests as well."""
    rig = Rig()
    msg = make_generate("again", range(8), max_new_tokens=6)
    running = RunningRequest(msg, pack_i32([1]), 6, 0.0)
    state = SessionState(running, rig.scheduler.worker.fingerprint, bytes(16))
    rig.sim.submit("a", range(8), max_new_tokens=6)
    assert rig.ask(True, wait_s=5.0) is None
    for _ in range(2):  # while it waits for the end of what runs, and when all is gone
        moved = rig.scheduler.arrivals.admit_moved(msg, unpack_i32(running.output), 6)
        assert moved == rig.problem()
        rig.sim.tell(ResumeReq(state))
        rig.sim.outbox.flush()
        [error] = [m for m in rig.sim.to_detokenizer.messages if isinstance(m, ReqError)]
        rig.sim.to_detokenizer.messages.clear()
        assert (error.rid, error.status, error.message) == ("again", 503, rig.problem())
        rig.sim.run_until_idle()
        rig.occupation.tick(rig.sim.now)
        if rig.occupation.state is MemoryState.RELEASING:
            rig.obey()
    assert rig.occupation.state is MemoryState.RELEASED


def test_requests_are_not_cut_short() -> None:
    rig = Rig()
    rig.sim.submit("a", range(8), max_new_tokens=6)
    refused = rig.ask(True)
    assert refused is not None
    assert (refused.status, "1 requests are running or queued" in refused.text) == (409, True)
    assert rig.problem() is None
    # With time, it ends first; a request that comes meanwhile is refused.
    assert rig.ask(True, wait_s=5.0) is None
    assert rig.occupation.seconds_left(rig.sim.now) == pytest.approx(5.0)
    assert rig.problem() is not None
    while not rig.scheduler.is_idle:
        rig.sim.plan()
        rig.occupation.tick(rig.sim.now)
        assert rig.occupation.state is MemoryState.EMPTYING
        rig.sim.work()
    rig.occupation.tick(rig.sim.now)
    assert rig.sim.tokens["a"] == reference_output(range(8), 6)
    assert isinstance(rig.obey(), MemoryResult)


def test_who_runs_longer_than_that_goes_on() -> None:
    rig = Rig()
    rig.sim.submit("a", range(8), max_new_tokens=60)
    rig.sim.plan()
    rig.ask(True, wait_s=2.0)
    rig.sim.now += 2.0
    rig.occupation.tick(rig.sim.now)
    result = rig.answer()
    assert result is not None
    assert (result.status, rig.problem(), rig.occupation.state) == (409, None, MemoryState.HELD)
    rig.sim.run_until_idle()
    assert rig.sim.tokens["a"] == reference_output(range(8), 60)


def test_the_prefix_cache_goes_with_the_pool_and_stays_without_it() -> None:
    rig = Rig()
    rig.sim.submit("a", range(40), max_new_tokens=2)
    rig.sim.run_until_idle()
    rig.ask(True, "weights")
    rig.obey()
    assert rig.scheduler.memory.pool.usage()["cached"] == 40
    rig.ask(True, "kv_cache")
    rig.obey()
    usage = rig.scheduler.memory.pool.usage()
    assert (usage["cached"], usage["free"]) == (0, usage["total"])
    rig.scheduler.check_invariants()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_a_host_tier_takes_is_saved_first_and_found_again(policy: str) -> None:
    sim = TieredSim(store=False, hicache_write_policy=policy)
    rig = Rig(sim)
    sim.submit("a", range(40), max_new_tokens=2)
    sim.settle()
    rig.ask(True, "kv_cache")
    # Saves, if any are left, are in the worker's order before the pool's end.
    *saves, last = sim.to_worker.messages
    assert isinstance(last, ReleaseMemory)
    assert all(isinstance(message, CopyPages) for message in saves)
    assert bool(saves) == (policy == "write_back")
    rig.obey()
    sim.worker.kv[:] = 0  # as memory comes back
    rig.ask(False)
    rig.obey()
    sim.submit("b", [*range(40), 1, 2], max_new_tokens=6)
    sim.settle()
    assert sim.tokens["b"] == reference_output([*range(40), 1, 2], 6)
    assert sim.ends["b"].meta.cached_tokens == 40  # type: ignore[union-attr]


def test_peers_let_go_first_or_it_stays() -> None:
    rig = Rig()
    peers: Any = Peers()
    rig.scheduler.handovers = peers
    peers.memory = [object()]
    refused = rig.ask(True)
    assert refused is not None
    assert "hand-overs or steps are not over" in refused.text
    peers.memory = []
    assert rig.ask(True) is None
    assert (rig.occupation.state, peers.closed) == (MemoryState.PARTING, True)
    assert not rig.sim.to_worker.messages
    rig.sim.now += PARTING_SECONDS
    rig.occupation.tick(rig.sim.now)
    stayed = rig.answer()
    assert stayed is not None
    assert (stayed.status, peers.closed) == (409, False)
    rig.ask(True)
    peers.is_closed = True
    rig.occupation.tick(rig.sim.now)
    rig.obey()
    assert peers.closed
    rig.ask(False, "kv_cache")
    rig.obey()
    assert peers.closed  # without weights it exchanges nothing either
    rig.ask(False)
    rig.obey()
    assert not peers.closed


def test_what_cannot_be_had_again_is_still_away() -> None:
    rig = Rig()
    rig.ask(True)
    rig.obey()
    rig.ask(False)
    assert rig.problem() == "the instance takes its memory again; try again in a few seconds"
    failed = rig.obey(error="weights take 9 GiB, but 1 GiB are free")
    assert (failed.status, failed.text[:12]) == (503, "weights take")
    assert rig.occupation.released == ["kv_cache", "weights"]
    assert rig.occupation.state is MemoryState.RELEASED
    rig.ask(False)
    assert isinstance(rig.obey(), MemoryResult)


def test_what_a_worker_keeps_is_refused_by_name() -> None:
    rig = Rig()
    rig.scheduler.worker.unreleasable = [Unreleasable("weights", "they are foreign")]
    rig.occupation = MemorySaver(rig.scheduler)
    refused = rig.ask(True)
    assert refused is not None
    assert refused.text == 'weights can\'t be given back: they are foreign; ask with "tags": ["kv_cache"]'
    assert rig.ask(True, "kv_cache") is None
    rig.obey()
    rig.scheduler.draining = True
    rig.ask(False)
    rig.obey()
    refused = rig.ask(True, "kv_cache")
    assert refused is not None
    assert "draining" in refused.text


def test_metrics_tell_what_is_away_and_how_short_memory_is() -> None:
    rig = Rig(SimInstance(make_options(max_total_tokens=64)))
    report = MetricsReport(
        rig.scheduler, [PressureMeter(rig.scheduler.memory.pool, rig.scheduler.planner), rig.occupation]
    )
    rig.ask(True)
    rig.obey()
    report.tick(rig.sim.now)
    rig.sim.outbox.flush()
    [answered] = rig.sim.to_detokenizer.messages
    page = page_of(answered.families)
    assert [page.total("pdserve_memory_released", tag=tag) for tag in ("kv_cache", "weights")] == [1, 1]
    assert [page.total("pdserve_kv_pressure", level=level) for level in ("none", "some", "high")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("left", "waiting", "since", "level"),
    [
        (1.0, 9, math.inf, Pressure.NONE),
        (0.25, 0, 60.0, Pressure.NONE),
        (0.24, 0, math.inf, Pressure.SOME),
        (1.0, 0, 59.0, Pressure.SOME),
        (0.01, 0, math.inf, Pressure.SOME),
        (0.01, 1, math.inf, Pressure.HIGH),
        (1.0, 0, 9.9, Pressure.HIGH),
    ],
)
def test_levels(left: float, waiting: int, since: float, level: Pressure) -> None:
    assert pressure(left, waiting, since) is level


def test_a_retraction_is_pressure_for_a_while() -> None:
    sim = SimInstance(make_options(max_total_tokens=64, schedule_conservativeness=0.1))
    meter = PressureMeter(sim.scheduler.memory.pool, sim.scheduler.planner)
    meter.tick(1.0)
    assert meter.level(1.0) is Pressure.NONE
    for i in range(4):
        sim.submit(f"r{i}", [i, i + 1, i + 2], max_new_tokens=30)
    sim.run_until_idle()
    meter.tick(2.0)
    levels = [meter.level(2.0 + seconds) for seconds in (0, 9, 11, 61)]
    assert levels == [Pressure.HIGH, Pressure.HIGH, Pressure.SOME, Pressure.NONE]


def test_the_pool_that_has_less_left_counts() -> None:
    usage = {"total": 100, "free": 50, "cached": 30}
    assert share_left(usage) == 0.8
    assert share_left(usage | {"window_total": 10, "window_free": 1, "window_cached": 0}) == 0.1
