"""Which cores the options mean, and that threads really end up there (in a process of their own)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.machine import limit

from pdserve.model_runner.placement import Placement, PlacementError, parse_cpus, plan_placement

FOUR = frozenset(range(4))


def test_cpus_are_lists_of_cores_and_ranges_in_their_order() -> None:
    assert parse_cpus("3") == (3,)
    assert parse_cpus("5, 0,2-4") == (5, 0, 2, 3, 4)


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "3-1", "1,1", "0-2,1", "1-2-3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="--cpus"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("threads", "cpus", "expected"),
    [
        (None, None, Placement(4, None, FOUR)),
        (2, None, Placement(2, None, FOUR)),
        (None, "1-3", Placement(3, (1, 2, 3), FOUR)),
        (1, "1-3", Placement(1, (1,), FOUR)),
    ],
)
def test_threads_default_to_one_a_core(threads: int | None, cpus: str | None, expected: Placement) -> None:
    assert plan_placement(threads, cpus, FOUR) == expected


@pytest.mark.parametrize(
    ("threads", "cpus", "named"), [(3, "0-1", "--threads 3"), (None, "4", r"\[0, 1, 2, 3\]"), (0, None, "0")]
)
def test_what_can_t_be_had_is_refused(threads: int | None, cpus: str | None, named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        plan_placement(threads, cpus, FOUR)


BIND = """
import os, sys, threading
from pdserve.model_runner.placement import bind_compute_threads, confine, floating, plan_placement

allowed = frozenset(os.sched_getaffinity(0))
placement = plan_placement(None, sys.argv[1], allowed)
confine(placement)
bound = bind_compute_threads(placement)
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


@pytest.mark.parametrize("count", [1, 2])
def test_compute_threads_get_a_core_each_and_others_none(count: int) -> None:
    cores = sorted(os.sched_getaffinity(0), reverse=True)[:count]
    if len(cores) < count:
        pytest.skip("this machine has one core")
    done = subprocess.run(
        [sys.executable, "-c", BIND, ",".join(map(str, cores))], capture_output=True, text=True, timeout=limit(60)
    )
    assert done.returncode == 0, done.stderr
