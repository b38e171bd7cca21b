"""The worker's loop keeps the GPU busy: the next step is launched before the one before has ended."""

from __future__ import annotations

import pytest
from support.simulated_worker import SimulatedWorker, Times


@pytest.mark.parametrize("answer", [0.15, 0.3])
@pytest.mark.parametrize("launch", [0.25, 0.35, 0.5])
@pytest.mark.parametrize("step", [1.25, 3.6, 6.4])
def test_the_gpu_never_waits_for_a_launch(step: float, launch: float, answer: float) -> None:
    worker = SimulatedWorker(Times(step, launch, answer))
    assert worker.idle_share() <= 0.01
    assert worker.sent_ids == list(range(1, len(worker.sent_ids) + 1))


def test_a_host_that_is_slower_than_the_gpu_is_seen_to_be() -> None:
    assert SimulatedWorker(Times(step=0.4, launch=0.5, answer=0.2)).idle_share() > 0.1
