"""What requests leave behind: nothing that only a collection of all objects would find."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from support.sim import SimInstance, make_options
from support.sim_pair import SimPair, run_until_idle
from support.sim_tiers import TieredSim

from pdserve.messages.requests import AbortReq


@pytest.fixture
def cycles() -> Iterator[Callable[[], Counter[type]]]:
    """Returns the kinds of objects in cycles that are unreachable."""

    def found() -> Counter[type]:
        gc.collect()
        return Counter(type(thing) for thing in gc.garbage)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def serve(sim: SimInstance, run: Callable[[], None]) -> None:
    """Serve requests: some end well, one is aborted, one fails, some are evicted, retracted or follow others.

    Then drop all.
    """
    for i in range(12):
        sim.submit(f"r{i}", [5] * 16 + [j * (1 + i % 5) % 97 for j in range(14)], max_new_tokens=9)
        if i % 4 == 3:
            sim.plan()
            sim.scheduler.abort(AbortReq(f"r{i}"))
            sim.scheduler.memory.condemn(sim.scheduler.reqs[f"r{i - 1}"])
            run()
    sim.scheduler.memory.flush()


@pytest.mark.parametrize("options", [{}, {"schedule_policy": "lpm"}, {"fair_scheduling": True}], ids=str)
def test_requests_leave_no_cycles(cycles: Callable[[], Counter[type]], options: dict[str, object]) -> None:
    sim = SimInstance(make_options(max_total_tokens=96, chunked_prefill_size=16, **options))
    serve(sim, sim.run_until_idle)
    assert not cycles()


def test_tiers_leave_no_cycles(cycles: Callable[[], Counter[type]]) -> None:
    sim = TieredSim(20, kv_debug=True, max_total_tokens=96)
    serve(sim, sim.settle)
    assert not cycles()


def test_hand_overs_leave_no_cycles(cycles: Callable[[], Counter[type]]) -> None:
    pair = SimPair()
    for i in range(4):
        pair.submit(f"r{i}", [j * (1 + i) % 97 for j in range(30)], i + 1, max_new_tokens=9)
    run_until_idle(pair)
    assert not cycles()
