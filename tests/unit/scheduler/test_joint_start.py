"""Prompts that come together start to decode together, where that is sooner for them; simulated on virtual machines."""

from __future__ import annotations

import random

import msgspec
import pytest
from support.sim import make_generate, reference_output
from support.sim_machine import AddedUp, Machine, TimedSim

from pdserve.scheduler import joint_start
from pdserve.scheduler.joint_start import JointStart

HEAVY = AddedUp(read_ms=40, token_ms=1.45, kv_token_ms=2e-3, pair_ms=5e-5, decode_ms=0.3)
"""A model of a billion parameters on two cores."""
LIGHT = Machine(read_ms=5, token_ms=0.25, decode_ms=0.15)
OPTIONS = {"max_total_tokens": 1 << 16, "max_running_requests": 64, "ttft_target_ms": 0.0, "chunked_prefill_size": 512}
CHUNK_SECONDS = 0.79
"""What a step of 512 prompt tokens takes on the heavy one."""


class Batch:
    """Requests that came at once. ``lengths``: of their prompts."""

    def __init__(self, lengths: list[int], curve: Machine = HEAVY, *, output: int = 32, **options) -> None:
        self.sim = TimedSim(curve, **(OPTIONS | options))
        rng = random.Random(1)
        self.prompts = [[rng.randrange(97) for _ in range(length)] for length in lengths]
        self.output = output
        self.begin = self.sim.now
        for i, prompt in enumerate(self.prompts):
            self.send(f"r{i}", prompt)

    def send(self, rid: str, prompt: list[int], **fields) -> None:
        """Send one more request of the batch."""
        message = make_generate(rid, prompt, max_new_tokens=self.output)
        message = msgspec.structs.replace(message, arrival=self.sim.now, **fields)
        self.sim.scheduler.arrivals.admit(message, self.sim.now)

    def run(self) -> list[float]:
        """Run all, and return the seconds to each one's first token."""
        self.sim.run_until(lambda: len(self.sim.ends) == len(self.prompts))
        for i, prompt in enumerate(self.prompts):
            assert self.sim.tokens[f"r{i}"] == reference_output(prompt, self.output)
        return [self.sim.first_token_at[f"r{i}"] - self.begin for i in range(len(self.prompts))]


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointStart, "holds", lambda *_: False)


@pytest.mark.parametrize("count", [8, 16])
def test_a_batch_begins_as_one(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([128] * count)
    together = batch.run()
    assert max(together) < 1.1 * min(together)
    without(monkeypatch)
    before = Batch([128] * count)
    one_by_one = before.run()
    assert min(one_by_one) < 0.6 * min(together)
    assert max(one_by_one) > 1.5 * max(together)
    assert sum(together) < 0.8 * sum(one_by_one)
    assert batch.sim.now - batch.begin < (before.sim.now - before.begin) / 1.25


def test_no_request_is_held_if_prompts_are_as_fast_beside_decodes() -> None:
    firsts = Batch([128] * 16, LIGHT).run()
    assert min(firsts) < 0.6 * max(firsts)


def test_no_request_is_held_for_a_much_longer_prompt() -> None:
    firsts = Batch([100, 100, 1500]).run()
    assert max(firsts[:2]) < 1.1 * CHUNK_SECONDS


def test_no_request_is_held_for_longer_than_the_limit() -> None:
    firsts = sorted(Batch([128] * 40).run())
    assert firsts[0] < max(joint_start.MOST_SECONDS, joint_start.MOST_TIMES * CHUNK_SECONDS / 4) + CHUNK_SECONDS
    assert firsts[-1] > 1.5 * joint_start.MOST_SECONDS


def test_who_wants_one_token_is_not_held() -> None:
    firsts = sorted(Batch([128] * 8, output=1).run())
    assert firsts[0] < 1.1 * CHUNK_SECONDS


def test_no_request_is_held_for_those_that_have_no_row() -> None:
    firsts = sorted(Batch([128] * 8, max_running_requests=4).run())
    assert firsts[3] < 1.1 * CHUNK_SECONDS


def test_no_request_waits_for_those_that_get_no_memory() -> None:
    firsts = sorted(Batch([128] * 8, max_total_tokens=128 * 5).run())
    assert firsts[0] < 2.1 * CHUNK_SECONDS


def test_a_higher_priority_is_not_held_for_a_lower_one() -> None:
    batch = Batch([], enable_priority_scheduling=True)
    rng = random.Random(1)
    for i in range(8):
        prompt = [rng.randrange(97) for _ in range(128)]
        batch.send(f"r{i}", prompt, priority=10 if i < 4 else 0)
    batch.sim.run_until(lambda: len(batch.sim.ends) == 8)
    assert max(batch.sim.first_token_at[f"r{i}"] for i in range(4)) - batch.begin < 1.1 * CHUNK_SECONDS


def test_while_a_request_decodes_the_budget_decides() -> None:
    sim = TimedSim(HEAVY, max_total_tokens=1 << 16, chunked_prefill_size=512)
    sim.submit("reader", range(20), max_new_tokens=400)
    sim.run_until(lambda: "reader" in sim.first_token_at)
    sim.gaps.clear()
    begin = sim.now
    rng = random.Random(1)
    for i in range(8):
        sim.submit(f"r{i}", [rng.randrange(97) for _ in range(128)], max_new_tokens=2)
    sim.run_until(lambda: all(f"r{i}" in sim.first_token_at for i in range(8)))
    assert max(ms for shape, ms in sim.gaps if shape.decodes) < CHUNK_SECONDS * 1000 / 2
    firsts = sorted(sim.first_token_at[f"r{i}"] - begin for i in range(8))
    assert firsts[0] < 0.3 * firsts[-1]
