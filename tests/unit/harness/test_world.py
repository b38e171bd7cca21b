"""Whole instances under virtual time: the real scheduler, hand-overs, peers and transfer engine over simulated sockets.

By chance (``campaign.py``), and in every order of a small scene (``two_rooms.py``, ``crowded.py``). What both can find
is shown by mistakes that are made on purpose (``seeded.py``). Campaigns without moves are slow tests: those with moves
check the same, with and without faults.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from support.sim import NO_WINDOW, SimWindow
from support.world.campaign import EQUALS, PAIR, Campaign
from support.world.crowded import CROWDS
from support.world.explorer import MOST_STATES, Found, explore, explore_by_walks
from support.world.seeded import CROWDED_MISTAKES, MISTAKES, QUICKLY_FOUND, RESIZE_MISTAKES, WINDOW_MISTAKES, WINDOWED
from support.world.sim_backend import SimBackend
from support.world.two_rooms import FAULTS, TwoRooms
from support.world.world import Violation

from pdserve.disaggregation.transfer.backends.base import WriteState
from pdserve.mem_cache.errors import WindowPagesShort

HANDOVERS = int(os.environ.get("PDSERVE_SIMULATED_HANDOVERS", "100000"))
SEARCH_SECONDS = 600.0
"""Limit of the searches that are too large to be complete. They may find nothing; they never fail by it."""
FEW_STATES = 150
"""Limit of the searches of make test that can't be complete: the same states on any machine."""
RULES = {"tcp": {}, "shm": {"lets_go": True}, "hostile": {"hostile": True}}
"""Rules of the links, see ``SimBackend``."""
MODES = {"pairs": PAIR, "equals": EQUALS}
SHARES = len(MODES) * len(RULES)
WINDOW = SimWindow(10, 64)
"""Window pages are enough for four requests at most."""
WINDOWS = {"one group": NO_WINDOW, "windows": WINDOW}
DRAWN = {"one group": (1, NO_WINDOW), "windows": (2, WINDOW), "one group again": (3, NO_WINDOW)}
"""Seeds, and what is drawn by them."""
FAULT_RATES = {"no faults": 0, "faults": 8}
LONG = (1, 3, 12, 40, 80)
"""Outputs, in tokens: long enough to be met while they grow."""
WHOLE = ("none", "abort", "repeat", "corrupt")


@pytest.fixture(autouse=True)
def few_words(caplog):
    """A world has more peers to lose than a log has lines."""
    with caplog.at_level("CRITICAL", "pdserve"):
        yield


CROWD_STATES = 200
"""Limit of the searches of make test through three instances: the same states on any machine."""
MANY_CROWD_STATES = 10_000
"""Limit of the slow ones that can't be complete."""
EVERYTHING_UNDER_WAY: dict[str, Any] = {"at_once": ()}


def explored(seconds: float = math.inf, states: int = MOST_STATES, **scene) -> Found:
    return explore(lambda: TwoRooms(**scene), seconds=seconds, states=states)


def some(chosen: set[tuple[str, ...]], *axes: Mapping[str, object]) -> list[object]:
    """Return all combinations of the axes' values; those that are not ``chosen`` by their names are slow.

    Campaigns with moves are much alike: what one of them leaves out of its own grid another one has in its.
    """
    return [
        pytest.param(
            *(value for _, value in pairs), id="-".join(names), marks=() if names in chosen else pytest.mark.slow
        )
        for pairs in itertools.product(*(axis.items() for axis in axes))
        for names in [tuple(name for name, _ in pairs)]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("modes", [PAIR, EQUALS], ids=["pairs", "equals"])
@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW], ids=["one group", "windows"])
def test_where_nothing_goes_wrong_nothing_fails(modes, rules, window) -> None:
    campaign = Campaign(1, modes, window=window, **rules)
    campaign.run(200)
    assert campaign.outcomes["finished"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("modes", [PAIR, EQUALS], ids=["pairs", "equals"])
@pytest.mark.parametrize(("seed", "window"), [(1, NO_WINDOW), (2, NO_WINDOW), (3, WINDOW)])
def test_whatever_goes_wrong_nothing_is_lost(modes, rules, seed, window) -> None:
    campaign = Campaign(seed, modes, faults=12, window=window, **rules)
    campaign.run(200, rate=15.0)
    assert campaign.outcomes["finished"] > 80
    assert campaign.faults.total() > 5


@pytest.mark.parametrize(
    ("rules", "modes", "window"),
    some({("hostile", "pairs", "one group")}, RULES, MODES, WINDOWS),
)
def test_a_running_request_goes_on_elsewhere(modes, rules, window) -> None:
    campaign = Campaign(3, modes, moves=100, outputs=LONG, window=window, **rules)
    campaign.run(200, rate=20.0)
    assert campaign.moves["moved"] > 10  # 15 to 69, by which instance has memory when it is asked
    assert campaign.outcomes["finished"] > 250


@pytest.mark.parametrize(
    ("rules", "modes", "drawn"),
    some({("tcp", "equals", "one group again")}, RULES, MODES, DRAWN),
)
def test_whatever_goes_wrong_a_request_is_not_lost_on_its_way(modes, rules, drawn) -> None:
    """It goes on where it was, or where it was to go to."""
    seed, window = drawn
    campaign = Campaign(seed, modes, moves=100, faults=8, outputs=LONG, window=window, **rules)
    campaign.run(200, rate=15.0)
    assert campaign.outcomes["moved"] >= 3
    assert campaign.faults.total() > 5


@pytest.mark.parametrize(
    ("rules", "faults", "window"),
    some({("shm", "faults", "windows")}, RULES, FAULT_RATES, WINDOWS),
)
def test_kv_that_is_given_back_is_right_or_not_there(faults, rules, window) -> None:
    campaign = Campaign(2, PAIR, faults=faults, moves=30, outputs=LONG, return_kv=True, window=window, **rules)
    campaign.run(200, rate=15.0)
    assert campaign.kept() > (0 if faults else 50)  # of the latest lives only


@pytest.mark.sample(4)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("modes", [PAIR, EQUALS], ids=["pairs", "equals"])
@pytest.mark.parametrize("window", [NO_WINDOW, SimWindow(10, 128)], ids=["one group", "windows"])
@pytest.mark.parametrize("faults", [0, 8])
def test_pools_get_another_size_whatever_is_under_way(modes, rules, window, faults) -> None:
    campaign = Campaign(2, modes, faults=faults, moves=30, resizes=25, window=window, **rules)
    campaign.run(150, rate=20.0)
    assert campaign.outcomes["finished"] > (60 if faults else 200)
    assert faults or len(campaign.sizes()) > 10  # of the latest lives only


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("modes", [PAIR, EQUALS], ids=["pairs", "equals"])
def test_a_hundred_thousand_hand_overs(modes, rules, capsys) -> None:
    """A share of them here, in worlds of a thousand: an old world has little that is new."""
    finished = faults = 0
    for seed in range(100, 100 - (-HANDOVERS // SHARES // 1000)):
        window = WINDOW if seed % 2 else NO_WINDOW
        resizes = 10.0 if seed % 4 == 0 else 0.0
        campaign = Campaign(seed, modes, faults=seed % 5 * 2.0, resizes=resizes, window=window, **rules)
        campaign.run(1000, rate=20.0)
        finished += campaign.outcomes["finished"]
        faults += campaign.faults.total()
    with capsys.disabled():
        print(f"\n{HANDOVERS // SHARES} hand-overs, {faults} faults: {finished} legs finished as they should")
    assert finished > HANDOVERS // SHARES


@pytest.mark.sample(4)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("modes", [PAIR, EQUALS], ids=["pairs", "equals"])
@pytest.mark.parametrize("threshold", ["auto", "12"])
@pytest.mark.parametrize("faults", [0, 8])
def test_nothing_is_lost_wherever_prompts_are_computed(modes, rules, threshold, faults) -> None:
    window = WINDOW if threshold == "auto" else NO_WINDOW
    campaign = Campaign(4, modes, faults=faults, moves=20, disaggregation_threshold=threshold, window=window, **rules)
    campaign.run(150, rate=20.0)
    assert campaign.outcomes["finished"] > (60 if faults else 120)
    assert faults or min(campaign.places()) > 20  # of the latest lives only


@pytest.mark.slow
@pytest.mark.parametrize("window", [NO_WINDOW, WINDOWED], ids=["one group", "windows"])
def test_every_order_of_two_rooms(window) -> None:
    found = explored(window=window)
    assert found.violation is None, found
    assert found.complete


def test_some_orders_of_two_rooms_with_windows() -> None:
    found = explored(states=FEW_STATES, window=WINDOWED)
    assert found.violation is None, found


@pytest.mark.parametrize(
    "here",
    [
        pytest.param((), id="there", marks=pytest.mark.slow),
        pytest.param(("r0",), id="the first here"),
        pytest.param(("r1",), id="the second here", marks=pytest.mark.slow),
    ],
)
def test_every_order_of_two_rooms_that_ask_where(here) -> None:
    found = explored(states=FEW_STATES, here=frozenset(here), cached=True)
    assert found.violation is None, found


def test_some_orders_of_two_rooms_of_one_name() -> None:
    found = explored(states=FEW_STATES, same=True)
    assert found.violation is None, found


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "abort"])
@pytest.mark.parametrize("here", [None, frozenset({"r0"})], ids=["there", "the first here"])
def test_every_order_of_two_rooms_of_one_name(fault, here) -> None:
    found = explored(fault=fault, same=True, here=here)
    assert found.violation is None, found
    assert found.complete


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_order_of_two_equals_that_dial_each_other(capsys) -> None:
    found = explored(SEARCH_SECONDS, equals=True)
    with capsys.disabled():
        print(f"\nequals: {found}")
    assert found.violation is None, found


def crowded(crowd: str, states: int = MOST_STATES, **how) -> Found:
    """Explore a scene of three instances. Some request waits for memory there, and some reservation is given back."""
    seen: Counter[str] = Counter()
    found = explore_by_walks(lambda: CROWDS[crowd].stage(seen, **how), seed=1, states=states)
    if found.violation is None:
        assert seen["waits for memory"], found
        assert seen["given back"], found
    return found


def test_every_order_of_two_prefills_of_different_rank() -> None:
    found = crowded("two prefills")
    assert found.violation is None, found
    assert found.complete


@pytest.mark.parametrize("crowd", [crowd for crowd in CROWDS if crowd != "two prefills"])
def test_some_orders_of_three_instances(crowd) -> None:
    found = crowded(crowd, CROWD_STATES)
    assert found.violation is None, found
    assert found.states == CROWD_STATES


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("crowd", [crowd for crowd in CROWDS if crowd != "two prefills"])
def test_every_order_of_three_instances(crowd, capsys) -> None:
    found = crowded(crowd)
    with capsys.disabled():
        print(f"\n{crowd}: {found}")
    assert found.violation is None, found
    assert found.complete


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("crowd", "how"),
    [
        pytest.param("ring", {"awaited": False}, id="ring"),
        pytest.param("each other", {"awaited": False}, id="each other"),
        pytest.param("two decodes", {"awaited": False}, id="two decodes"),
        pytest.param("ring", EVERYTHING_UNDER_WAY, id="ring, everything under way"),
        pytest.param("two prefills", EVERYTHING_UNDER_WAY, id="two prefills, everything under way"),
        pytest.param("two decodes", EVERYTHING_UNDER_WAY, id="two decodes, everything under way"),
    ],
)
def test_many_orders_of_three_instances(crowd, how, capsys) -> None:
    found = crowded(crowd, MANY_CROWD_STATES, **how)
    with capsys.disabled():
        print(f"\n{crowd}, {how}: {found}")
    assert found.violation is None, found
    assert found.complete or found.states == MANY_CROWD_STATES


@pytest.mark.slow
def test_walks_leave_no_state_out() -> None:
    seen: Counter[str] = Counter()
    walks, breadth_first = (
        crowded("two prefills"),
        explore(lambda: CROWDS["two prefills"].stage(seen), seconds=math.inf),
    )
    assert walks.complete
    assert breadth_first.complete
    assert walks.states == breadth_first.states
    assert walks.moves < breadth_first.moves


@pytest.mark.parametrize(
    ("mistake", "crowd"),
    [
        pytest.param(mistake, crowd, marks=() if mistake in QUICKLY_FOUND else pytest.mark.slow)
        for mistake, crowds in CROWDED_MISTAKES.items()
        for crowd in crowds
    ],
    ids=lambda what: what if isinstance(what, str) else what.__name__,
)
def test_mistakes_among_three_instances_are_found(mistake, crowd, monkeypatch) -> None:
    mistake(monkeypatch)
    found = crowded(crowd, CROWD_STATES)
    assert found.violation is not None, found
    assert found.trace


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lets_go", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_order_of_two_rooms_and_a_fault(fault, lets_go, capsys) -> None:
    found = explored(SEARCH_SECONDS, fault=fault, lets_go=lets_go)
    with capsys.disabled():
        print(f"\n{fault}, {'shm' if lets_go else 'tcp'}: {found}")
    assert found.violation is None, found
    # Where a peer or a link is lost, both sides find each other anew: that is more than ten minutes go through.
    assert found.complete or fault not in WHOLE


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake, monkeypatch, capsys) -> None:
    mistake(monkeypatch)
    found = explored(**MISTAKES[mistake])
    assert found.violation is not None, found
    assert found.trace
    with capsys.disabled():
        print(f"\n{mistake.__name__}: {found}")


@pytest.mark.parametrize(
    "mistake", [mistake for mistake in QUICKLY_FOUND if mistake in MISTAKES], ids=lambda mistake: mistake.__name__
)
def test_some_mistakes_are_found_at_once(mistake, monkeypatch) -> None:
    mistake(monkeypatch)
    assert explored(**MISTAKES[mistake]).violation is not None


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WINDOW_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_with_windows_are_found(mistake, monkeypatch) -> None:
    mistake(monkeypatch)

    def many() -> None:
        for seed in range(1, 10):
            Campaign(seed, EQUALS, moves=100, outputs=LONG, window=WINDOW).run(200, rate=20.0)

    with pytest.raises((WindowPagesShort, AssertionError), match=r"window|KV that landed"):
        many()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", RESIZE_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_with_sizes_are_found(mistake, monkeypatch) -> None:
    mistake(monkeypatch)

    def many() -> None:
        for seed in range(1, 10):
            window = RESIZE_MISTAKES[mistake]
            Campaign(seed, PAIR, moves=30, resizes=40, outputs=LONG[:-1], window=window).run(200, rate=20.0)

    with pytest.raises(AssertionError, match=r"window|KV that landed|wrong KV"):
        many()


@pytest.mark.slow
def test_a_lost_write_that_is_taken_for_a_failed_one_is_found(monkeypatch) -> None:
    """Its pages would be given to others while it may still land.

    Moves put other requests into those pages soon.
    """
    poll = SimBackend.poll

    def sure(self, handle):
        state = poll(self, handle)
        return WriteState.FAILED if state is WriteState.LOST else state

    monkeypatch.setattr(SimBackend, "poll", sure)

    def many() -> None:
        for seed in range(1, 60):
            Campaign(seed, EQUALS, faults=60, moves=30, hostile=True).run(1000, rate=60.0)

    with pytest.raises(Violation, match="wrong KV was used"):
        many()
