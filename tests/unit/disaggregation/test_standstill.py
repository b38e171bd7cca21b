"""Limits of hand-overs find standstill: one that takes long and advances is not ended."""

from __future__ import annotations

import itertools
import random

import pytest
from support.sim import reference_output
from support.sim_pair import LIMITS, SimPair, assert_all_returned, run_until_idle
from support.world import timed
from support.world.campaign import Campaign
from support.world.node import HOST

from pdserve.disaggregation.transfer.outgoing_pages import PROGRESS_SECONDS
from pdserve.messages.handover import FirstToken, Progress
from pdserve.messages.moves import MigrateResult
from pdserve.messages.outputs import ReqError, Timing
from pdserve.messages.worker import SendProgress

SLOW = LIMITS.piece - 1
"""Seconds that one thing takes where no limit is to pass."""


class Steady(random.Random):
    """Each delay is the mean of its kind."""

    def random(self) -> float:
        """See ``random.Random``."""
        return 0.5

    def expovariate(self, lambd: float = 1.0) -> float:
        """See ``random.Random``."""
        return 1 / lambd


def turns(pair: SimPair, count: int) -> None:
    """Run ``count`` ticks of both loops, without computing or moving anything."""
    for _ in range(count):
        while pair.to_prefill or pair.to_decode:
            if pair.to_prefill:
                pair.deliver_to_prefill()
            if pair.to_decode:
                pair.deliver_to_decode()
        pair.decode.plan()
        pair.advance()


def begun(prompt: range) -> SimPair:
    """Make a pair with a prompt of several pieces. The first is computed, and nothing has landed."""
    pair = SimPair(chunked_prefill_size=8)
    pair.submit("a", prompt, 1, max_new_tokens=4)
    turns(pair, 4)
    while pair.decode.to_transfer.messages:
        pair.decode.transfer()
    pair.prefill.plan()
    pair.prefill.work()
    assert len(pair.pushes) == 1
    return pair


def test_a_prompt_that_others_pass_may_take_longer_than_any_limit():
    pair = begun(range(64))
    began = pair.now
    while "a" not in pair.prefill.tokens and 1 in pair.prefill.senders.rooms:
        pair.now += SLOW
        turns(pair, 3)
        pair.prefill.plan()
        pair.prefill.work()
    assert pair.now - began > LIMITS.queue + LIMITS.transfer
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(64), 4)
    assert_all_returned(pair)


def test_pages_that_land_slowly_may_take_longer_than_any_limit():
    pair = begun(range(64))
    while pair.prefill.to_worker.messages or pair.prefill.scheduler.planner.waiting:
        pair.prefill.plan()
        pair.prefill.work()
    began, (name,) = pair.now, pair.pushes
    while name in pair.pushes and pair.prefill.senders.rooms[1].failure is None:
        pair.copy(name)
        pair.now += LIMITS.transfer - 1
        turns(pair, 3)
    assert pair.now - began > LIMITS.queue + LIMITS.transfer
    run_until_idle(pair)
    assert pair.decode.tokens["a"] == reference_output(range(64), 4)


@pytest.mark.parametrize(("computed", "limit"), [(False, LIMITS.piece), (True, LIMITS.transfer)])
def test_a_hand_over_that_stands_still_is_ended(computed: bool, limit: float) -> None:
    pair = begun(range(64))
    while computed and not pair.prefill.senders.rooms[1].computed:
        pair.prefill.plan()
        pair.prefill.work()
    turns(pair, 3)
    pair.now += limit - 1
    turns(pair, 3)
    assert pair.prefill.senders.rooms[1].failure is None
    pair.now += 1.1
    turns(pair, 1)
    status, reason = pair.prefill.senders.rooms[1].failure
    assert status == 504
    assert f"no progress for {limit:.0f} s" in reason
    run_until_idle(pair)
    assert_all_returned(pair)


def test_a_decode_gives_up_a_prefill_that_says_nothing_more():
    pair = begun(range(64))
    receiver = pair.decode.receivers.rooms[1]
    pair.now += LIMITS.landing + 1
    pair.decode.receivers.advance(pair.now)
    pair.collect()
    assert pair.decode.ends["a"].status == 504
    assert "no progress for 25 s" in pair.decode.ends["a"].message
    assert receiver.state.name == "DRAINING"


@pytest.mark.parametrize("pages", [[3], [1 << 30], [1 << 30, (1 << 30) + 1]], ids=["equal", "too many", "more"])
def test_a_decode_gives_up_a_prefill_that_tells_of_progress_and_makes_none(pages: list[int]) -> None:
    """The prompt has 16 pages, and as many are to land."""
    pair = begun(range(64))
    receiver, since = pair.decode.receivers.rooms[1], pair.now
    reported = itertools.chain(pages, itertools.repeat(pages[-1]))
    while receiver.state.name == "TRANSFERRING" and pair.now < since + 10 * LIMITS.landing:
        pair.decode.receivers.on_progress(pair.link, Progress("decode", receiver.handover, next(reported)), pair.now)
        pair.now += LIMITS.landing / 4
        pair.decode.receivers.advance(pair.now)
    pair.collect()
    assert pair.now <= since + 1.5 * LIMITS.landing
    assert pair.decode.ends["a"].status == 504


def test_progress_of_a_prompt_comes_to_an_end() -> None:
    pair = begun(range(64))
    receiver = pair.decode.receivers.rooms[1]
    renewed = [pages for pages in range(100) if receiver.advances(pages, 4)]
    assert renewed == list(range(1, 33))


def test_a_decode_waits_no_longer_for_first_tokens_that_come_again() -> None:
    pair = begun(range(64))
    while not pair.prefill.senders.rooms[1].computed:
        pair.prefill.plan()
        pair.prefill.work()
    turns(pair, 3)
    receiver, since = pair.decode.receivers.rooms[1], pair.now
    assert not receiver.awaits_first_token
    again = FirstToken("decode", receiver.handover, 1, 0, Timing())
    while receiver.state.name == "TRANSFERRING" and pair.now < since + 10 * LIMITS.landing:
        pair.now += LIMITS.landing / 4
        pair.decode.receivers.on_first_token(pair.link, again, pair.now)
        pair.decode.receivers.advance(pair.now)
    assert pair.now <= since + 1.5 * LIMITS.landing


def test_a_prefill_counts_no_progress_of_its_worker_twice() -> None:
    pair = begun(range(64))
    (name,) = pair.pushes
    pair.copy(name)
    sender = pair.prefill.senders.rooms[1]
    before = sender.deadline
    pair.now += PROGRESS_SECONDS
    pair.prefill.senders.tick(pair.now)
    pair.prefill.senders.pushes.on_progress(SendProgress(name, sender.transfer.landed))
    assert sender.deadline == before
    assert not pair.peer.unsent
    pair.copy(name)
    assert sender.deadline > before
    assert [message.pages for message in pair.to_decode if isinstance(message, Progress)] == [4 + 2]


# --- whole instances ---

OPTIONS = {
    "chunked_prefill_size": 128,
    "disaggregation_queue_timeout": 20.0,
    "disaggregation_transfer_timeout": 12.0,
}
LANDING = 32.0


class SlowLinks:
    """Two instances that know each other, and between which a page takes 6 s. A step takes 4 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modes: str, **options: object) -> None:
        self.campaign = Campaign(1, modes, **(OPTIONS | options))
        self.campaign.chance.rng = Steady()
        self.here, self.there = self.campaign._nodes()
        self.here.manager._peers.peer_at(HOST, 9001, self.campaign.world.now)
        self.submit("first", 9, 2)
        self.campaign.chance.run(self.campaign.world.now + 3.0)
        assert not self.there.open
        monkeypatch.setitem(timed.MEAN_DELAYS, "data", 6.0)
        monkeypatch.setitem(timed.MEAN_DELAYS, "worker", 4.0)
        self.began = self.campaign.world.now

    def submit(self, rid: str, length: int, output: int) -> None:
        """Submit both legs: ``here`` computes the prompt, ``there`` continues it."""
        prompt = [3 * i % 50 for i in range(length)]
        self.campaign.world.answers[rid] = reference_output(prompt, output)
        room = len(self.campaign.submitted)
        for node in (self.here, self.there):
            self.campaign._leg(node, rid, prompt, room, 9000, output, "")

    def settle(self) -> float:
        """Run until nothing is left to do, and see that nothing failed. Returns the seconds."""
        while not self.campaign._is_quiet() and self.campaign.world.now < self.began + 1000:
            self.campaign.chance.run(self.campaign.world.now + 0.3)
        self.campaign._settle()
        assert not any(isinstance(end, ReqError) for end in self.campaign.world.ends.values())
        return self.campaign.world.now - self.began


def test_a_hand_over_by_a_slow_link_goes_through(monkeypatch) -> None:
    links = SlowLinks(monkeypatch, "prefill", "decode")
    links.submit("a", 120, 1)
    assert links.settle() > LANDING
    received = links.there.manager.receivers
    assert (received.done, received.failed, received.recomputed) == (2, 0, 0)


def test_a_move_by_a_slow_link_goes_through(monkeypatch) -> None:
    links = SlowLinks(monkeypatch, "unified", "unified")
    links.submit("a", 24, 60)
    links.campaign.chance.run(links.began + 60.0)
    assert links.there.tokens["a"]
    links.there.migrate("a", 9000)
    assert links.settle() > LANDING
    assert [type(reported) for reported in links.there.move_answers] == [MigrateResult]
    assert links.here.manager.receivers.recomputed == 0


def test_kv_that_is_given_back_by_a_slow_link_arrives(monkeypatch) -> None:
    links = SlowLinks(monkeypatch, "prefill", "decode", return_kv=True)
    links.submit("a", 8, 60)
    links.settle()
    assert links.campaign.kept() == 1
