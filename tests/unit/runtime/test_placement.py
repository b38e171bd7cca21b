"""Cores by option, and threads that run there (in a process of their own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import limit

from pdserve.model_runner.device.placement import CROWDED_SPIN_US, SPIN_US, bind_calling_thread, plan_placement
from pdserve.model_runner.ranks.rank_placement import plan_rank_placement
from pdserve.runtime.cpu_list import ThreadPlacementError, format_cores, parse_cpus, parse_kernel_list
from pdserve.runtime.machine.topology import Machine, read_machine
from pdserve.runtime.ranks import RankPlace

FOUR = frozenset(range(4))


def test_cpus_are_lists_of_cores_and_ranges_in_their_order() -> None:
    assert parse_cpus("3") == (3,)
    assert parse_cpus("5, 0,2-4") == (5, 0, 2, 3, 4)


def test_lists_are_written_as_they_are_read() -> None:
    assert format_cores([0, 1, 3, 4, 5, 9]) == "0,1,3-5,9"
    assert parse_cpus(format_cores([7, 0, 1, 2])) == (7, 0, 1, 2)
    assert parse_kernel_list("0-2,8\n") == [0, 1, 2, 8]
    assert parse_kernel_list("\n") == []


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "3-1", "1,1", "0-2,1", "1-2-3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ThreadPlacementError, match="--cpus"):
        parse_cpus(text)


def machine(cores: int = 4, *, smt: int = 1, nodes: int = 1, slow: tuple[int, ...] = (), quota: float | None = None):
    """Make a machine of cores 0, 1, …, in ``nodes`` equal parts.

    ``smt``: threads on each physical core, numbered as neighbours.
    """
    allowed, part = frozenset(range(cores)), cores // nodes
    siblings = {cpu: frozenset(range(cpu - cpu % smt, cpu - cpu % smt + smt)) for cpu in allowed}
    parts = {n: frozenset(range(n * part, (n + 1) * part)) for n in range(nodes)}
    return Machine(allowed, siblings, frozenset(slow), parts, quota)


@pytest.mark.parametrize(
    ("threads", "cpus", "count", "bound", "home"),
    [
        # Bound where they take all cores; fewer leave the choice to the kernel.
        (None, None, 4, (0, 1, 2, 3), FOUR),
        (4, None, 4, (0, 1, 2, 3), FOUR),
        (2, None, 2, None, FOUR),
        (None, "1-3", 3, (1, 2, 3), {1, 2, 3}),
        (1, "1-3", 1, (1,), {1}),
    ],
)
def test_threads_default_to_one_a_core(threads, cpus, count, bound, home) -> None:
    placement = plan_placement(threads, cpus, machine())
    assert (placement.threads, placement.cpus, placement.home, placement.allowed) == (count, bound, home, FOUR)
    assert placement.node is None
    assert placement.spin_us == SPIN_US


@pytest.mark.parametrize(
    ("box", "threads", "home", "node", "says"),
    [
        (machine(), 4, {0, 1, 2, 3}, None, "4 compute threads bound to cores 0-3: 4 allowed"),
        (machine(4, smt=2), 2, {0, 2}, None, "2 compute threads bound to cores 0,2: 4 allowed, 2 are SMT siblings"),
        (machine(4, slow=(3,)), 3, {0, 1, 2}, None, "bound to cores 0-2: 4 allowed, 1 is an efficiency core"),
        (machine(2, slow=(0, 1)), 2, {0, 1}, None, "2 compute threads bound to cores 0,1: 2 allowed"),
        (
            machine(8, nodes=2),
            4,
            {0, 1, 2, 3},
            0,
            "bound to cores 0-3 of NUMA node 0: 8 allowed, 4 on other NUMA nodes",
        ),
        (
            machine(8, smt=2, nodes=2, slow=(0, 1)),
            2,
            {4, 6},
            1,
            "are SMT siblings, 1 is an efficiency core, 1 on other",
        ),
        (machine(quota=2.9), 2, FOUR, None, "2 compute threads on cores 0-3: 4 allowed, a CPU quota of 2.9 cores"),
        (machine(quota=0.5), 1, FOUR, None, "1 compute thread on cores 0-3: 4 allowed, a CPU quota of 0.5 cores"),
        (machine(quota=1.0), 1, FOUR, None, "a CPU quota of 1 core"),
    ],
)
def test_threads_follow_the_machine(box, threads, home, node, says) -> None:
    placement = plan_placement(None, None, box)
    assert (placement.threads, placement.home, placement.node) == (threads, home, node)
    assert says in placement.reason
    assert not placement.is_crowded or threads == 1


def test_more_threads_than_a_node_holds_spread_over_all() -> None:
    box = machine(8, smt=2, nodes=2)
    assert plan_placement(2, None, box).home == {0, 2}
    assert plan_placement(4, None, box)[3:5] == ({0, 2, 4, 6}, None)
    assert plan_placement(5, None, box)[3:5] == (frozenset(range(8)), None)
    # Cores that are named are taken, whatever they are; memory follows them.
    assert plan_placement(None, "6-7", box)[3:5] == ({6, 7}, 1)


@pytest.mark.parametrize(
    ("threads", "cpus", "quota", "crowded"),
    [
        (4, None, None, False),
        (5, None, None, True),
        (4, None, 3.5, True),
        (2, "0-1", 1.0, True),
        (None, "0-1", 2, False),
    ],
)
def test_who_has_too_few_cores_does_not_spin(threads, cpus, quota, crowded) -> None:
    placement = plan_placement(threads, cpus, machine(quota=quota))
    assert placement.is_crowded == crowded
    assert placement.spin_us == (CROWDED_SPIN_US if crowded else SPIN_US)


@pytest.mark.parametrize(
    ("box", "threads", "cpus", "ranks", "threads_each", "homes"),
    [
        # A node each where there are as many, else as many cores each, wherever they are.
        (machine(8, nodes=2), None, None, 2, 4, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (machine(4), None, None, 2, 2, [{0, 1}, {2, 3}]),
        (machine(8, smt=2), None, None, 2, 2, [{0, 2}, {4, 6}]),
        (machine(5), None, None, 2, 2, [{0, 1}, {2, 3}]),
        (machine(4), 2, None, 2, 1, [{0, 1}, {2, 3}]),
        (machine(8), None, "1-4", 2, 2, [{1, 2}, {3, 4}]),
        (machine(4, quota=2.0), None, None, 2, 1, [{0, 1}, {2, 3}]),
        (machine(8, nodes=2), None, None, 4, 2, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
    ],
)
def test_ranks_of_a_host_have_cores_of_their_own(box, threads, cpus, ranks, threads_each, homes) -> None:
    placements = [plan_rank_placement(threads, cpus, box, RankPlace(rank, ranks)) for rank in range(ranks)]
    assert [placement.home for placement in placements] == homes
    assert {placement.threads for placement in placements} == {threads_each}
    assert {placement.allowed for placement in placements} == {box.allowed}
    assert not any(placement.is_crowded for placement in placements)
    # Those of the second host are placed as those of the first.
    assert plan_rank_placement(threads, cpus, box, RankPlace(ranks, 2 * ranks, nodes=2)) == placements[0]


def test_more_ranks_than_cores_take_turns() -> None:
    placements = [plan_rank_placement(None, None, machine(2), RankPlace(rank, 3)) for rank in range(3)]
    assert {(p.threads, p.home, p.cpus, p.spin_us) for p in placements} == {(1, frozenset({0, 1}), None, 1)}
    with pytest.raises(ThreadPlacementError, match="too few for 3 ranks"):
        plan_rank_placement(None, "0-1", machine(2), RankPlace(0, 3))
    with pytest.raises(ThreadPlacementError, match="each of 3 ranks needs one"):
        plan_rank_placement(1, None, machine(2), RankPlace(0, 3))


def test_a_quota_bounds_the_default_on_named_cores() -> None:
    placement = plan_placement(None, "0-3", machine(quota=2.0))
    assert placement.cpus == (0, 1)
    assert placement.reason == "2 compute threads bound to cores 0,1: --cpus says so, a CPU quota of 2 cores"


@pytest.mark.parametrize(
    ("threads", "cpus", "named"), [(3, "0-1", "--threads 3"), (None, "4", r"\[0, 1, 2, 3\]"), (0, None, "0")]
)
def test_what_can_t_be_had_is_refused(threads: int | None, cpus: str | None, named: str) -> None:
    with pytest.raises(ThreadPlacementError, match=named):
        plan_placement(threads, cpus, machine())


MEMORY = """
import mmap
from pdserve.model_runner.device.placement import prefer_memory_of

prefer_memory_of(0)
buffer = mmap.mmap(-1, 1 << 20)
buffer[0] = 1
print(open("/proc/self/numa_maps").read())
"""


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA nodes")
def test_memory_is_asked_for_on_the_node() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=limit(60), check=True)
    policies = {line.split()[1] for line in done.stdout.splitlines() if line}
    if policies == {"default"}:
        pytest.skip("memory policies are forbidden here")
    assert "prefer:0" in policies or "prefer=0" in policies, done.stdout


BIND = """
import os, sys, threading
from pdserve.model_runner.device.placement import confine, floating, plan_placement, start_torch_threads
from pdserve.runtime.machine.topology import read_machine

allowed = frozenset(os.sched_getaffinity(0))
placement = plan_placement(None, sys.argv[1], read_machine())
confine(placement)
bound = start_torch_threads(placement)
assert [os.sched_getaffinity(thread) for thread in bound] == [{cpu} for cpu in placement.cpus], bound
import torch
assert torch.get_num_threads() == len(placement.cpus)
seen = []
with floating(placement):
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
thread.join()
assert seen == [allowed], seen
assert os.sched_getaffinity(0) == {placement.cpus[0]}
"""


def test_the_calling_thread_is_the_first_of_those_that_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: moved.append((thread, cores)))
    placement = plan_placement(None, None, read_machine())
    bind_calling_thread(placement._replace(cpus=(5, 3)))
    bind_calling_thread(placement._replace(cpus=None))
    assert moved == [(0, {5})]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_compute_threads_get_a_core_each_and_others_none(count: int) -> None:
    cores = sorted(os.sched_getaffinity(0), reverse=True)[:count]
    if len(cores) < count:
        pytest.skip("this machine has one core")
    done = subprocess.run(
        [sys.executable, "-c", BIND, ",".join(map(str, cores))], capture_output=True, text=True, timeout=limit(60)
    )
    assert done.returncode == 0, done.stderr


YIELD = """
import os, threading
from pdserve.model_runner.device.placement import yield_cores

def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def of_a_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(nice()))
    thread.start()
    thread.join()
    return seen[0]

before = nice()
go, seen = threading.Event(), []
older = threading.Thread(target=lambda: (go.wait(60), seen.append(nice())))
older.start()
yield_cores(0)
assert nice() == before
yield_cores(15)
assert (nice(), of_a_thread()) == (15, 15)
go.set()
older.join()
assert seen == [before], seen  # ZMQ's threads, for one
"""


def test_others_go_before_compute_threads_and_no_earlier_thread() -> None:
    done = subprocess.run([sys.executable, "-c", YIELD], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
