"""KV of finished requests that is offered to the prefill of their prompts, and the memory that this keeps."""

from __future__ import annotations

import msgspec
import pytest
from support.claims import prompt_of
from support.sim import SimInstance, make_options
from support.sim_pair import make_peer

from pdserve.disaggregation.handover.migration.kv_returns import KVReturns
from pdserve.disaggregation.handover.migration.migration import Migration
from pdserve.messages.requests import Bootstrap


class Rooms:
    """Keeps what is offered, and what is given up."""

    def __init__(self) -> None:
        self.open: list[Migration] = []

    def add(self, move: Migration) -> None:
        """See ``MigrationRooms``."""
        self.open.append(move)

    def fail(self, move: Migration, reason: str) -> None:
        """See ``MigrationRooms``."""
        self.open.remove(move)


@pytest.mark.parametrize(("tokens", "is_kept"), [(512, True), (192, False)], ids=["to be computed", "for memory"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_kv_is_not_returned_if_a_request_waits_for_memory(when: str, tokens: int, is_kept: bool) -> None:
    sim, rooms = SimInstance(make_options(max_total_tokens=tokens)), Rooms()
    returns = KVReturns(sim.scheduler, rooms, lambda host, port, now: make_peer("p"))  # type: ignore[arg-type]
    sim.submit("a", prompt_of(1), max_new_tokens=20)
    for _ in range(10):
        sim.plan()
        sim.work()
    req = sim.scheduler.reqs["a"]
    req.msg = msgspec.structs.replace(req.msg, bootstrap=Bootstrap("p", 1, 1, trusted=True))
    if when == "before":
        returns.give_back(req)
        assert len(rooms.open) == 1
    for i in (2, 3):
        sim.submit(f"b{i}", prompt_of(i, 90), max_new_tokens=20)
    sim.plan()
    assert len(sim.scheduler.planner.waiting) == 1
    if when == "before":
        returns.make_room(2.0)
    else:
        returns.give_back(req)
    assert len(rooms.open) == is_kept
