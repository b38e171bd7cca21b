"""A short campaign of every mix of ``tests/campaigns``, and what plays them. ``make campaigns`` plays whole ones."""

from __future__ import annotations

from collections import Counter

import pytest
from campaigns.judges import FirstClaimIsServed, MemoryLeftIdle, NoStandstill, WaitsAreBounded
from campaigns.mixes import MIXES, SINGLE
from campaigns.runner import Tally, play, table
from support.world.node import Node
from support.world.world import Violation

from pdserve.messages.worker import ForwardStep
from pdserve.scheduler.kv_memory import KVMemory
from pdserve.scheduler.waiting import WaitingQueue

HANDOVERS = 12
"""Hand-overs of a short campaign."""
SEED = 1
PLAYED = set(list(MIXES)[::2])
"""Mixes that ``make test`` plays: every other one. A feature that is played with a pair is not played with equals."""
KNOWN_TO_FAIL: dict[str, str] = {}
"""Mixes that fail today, with the reason."""


def known(name: str) -> object:
    """Return a mix as a value of ``parametrize``."""
    marks = [] if name in PLAYED else [pytest.mark.slow]
    if name in KNOWN_TO_FAIL:
        # Violation alone: a wrong token of such a mix would be one, too, but no fault of the campaign's own code is.
        marks.append(pytest.mark.xfail(raises=Violation, reason=KNOWN_TO_FAIL[name], strict=False))
    return pytest.param(name, marks=marks)


@pytest.fixture(autouse=True)
def few_words(caplog):
    """A world has more peers to lose than a log has lines."""
    with caplog.at_level("CRITICAL", "pdserve"):
        yield


@pytest.mark.parametrize("name", [known(name) for name in MIXES])
def test_a_short_campaign_breaks_no_rule(name) -> None:
    report = MIXES[name].play(SEED, HANDOVERS)
    assert report.outcomes["finished"] > HANDOVERS / 2


@pytest.mark.parametrize("feature", [*SINGLE, "all"])
def test_every_feature_is_played(feature) -> None:
    assert {f"{feature}-pair", f"{feature}-equals"} & PLAYED


def test_mixes_that_are_known_to_fail_exist() -> None:
    assert KNOWN_TO_FAIL.keys() <= MIXES.keys()


def test_a_campaign_is_the_same_every_time() -> None:
    name = "burst-fcfs"
    assert MIXES[name].play(3, 12) == MIXES[name].play(3, 12) != MIXES[name].play(4, 12)


def test_a_failure_tells_how_to_play_it_again() -> None:
    class Fails:
        def play(self, seed, length=None):
            raise Violation("something is wrong")

    tally = Tally()
    failure = play("some-mix", Fails(), 7, tally)
    assert failure is not None
    assert "something is wrong" in str(failure)
    assert 'CAMPAIGNS="--mix some-mix --seed 7 --count 1"' in str(failure)
    assert tally.failures == [failure]
    assert "some-mix" in table([("some-mix", tally)])


def stops_working(monkeypatch) -> None:
    """Let the worker do no step after the tenth."""
    run, steps = Node.obey, Counter()

    def obey(node, message):
        steps[node.epoch] += isinstance(message, ForwardStep)
        if steps[node.epoch] <= 10:
            run(node, message)

    monkeypatch.setattr(Node, "obey", obey)


def gives_nothing(monkeypatch) -> None:
    """Give no request memory."""
    monkeypatch.setattr(KVMemory, "admit", lambda *args, **kwargs: False)


def passes_the_first(monkeypatch) -> None:
    """Give the first claim no memory while others get some."""
    admit = KVMemory.admit
    monkeypatch.setattr(
        KVMemory, "admit", lambda self, req, *args, **kwargs: req.rid != "r5" and admit(self, req, *args, **kwargs)
    )


def prefers_the_low(monkeypatch) -> None:
    """Let requests of low priority go first."""
    monkeypatch.setattr(WaitingQueue, "rank", lambda self, req: req.msg.priority)


@pytest.mark.parametrize(
    ("judge", "mistake", "name", "length"),
    [
        (NoStandstill, stops_working, "burst-fcfs", 12),
        (MemoryLeftIdle, gives_nothing, "burst-fcfs", 12),
        (FirstClaimIsServed, passes_the_first, "burst-fcfs", 12),
        pytest.param(WaitsAreBounded, prefers_the_low, "overload-priorities", 200, marks=pytest.mark.slow),
    ],
)
def test_a_judge_finds_a_mistake(judge, mistake, name, length, monkeypatch) -> None:
    monkeypatch.setattr("campaigns.mixed_campaign.JUDGES", (judge,))
    MIXES[name].play(SEED, 12)
    mistake(monkeypatch)
    with pytest.raises(Violation) as found:
        MIXES[name].play(SEED, length)
    assert found.traceback[-1].path.name == "judges.py"
