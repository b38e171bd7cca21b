"""Requests that should move to another instance: which of them stay."""

from __future__ import annotations

from support.sim import SimInstance
from support.sim_pair import LIMITS, make_peer

from pdserve.disaggregation.handover.migration.migration_source import MigrationSource
from pdserve.messages.moves import MigrateReq
from pdserve.messages.readout import Readout


def test_a_request_that_reads_a_vector_from_its_prompt_stays() -> None:
    sim = SimInstance()
    source = MigrationSource(sim.scheduler, LIMITS, lambda host, port, now: make_peer("other"))
    sim.submit("reads", range(8), max_new_tokens=1, readout=Readout("mean"))
    sim.submit("generates", range(8), max_new_tokens=1)
    source.move_all([("127.0.0.1", 9000)])
    source.advance(sim.now)
    for rid in ("reads", "generates"):
        source.migrate(MigrateReq(rid, "127.0.0.1", 9000), sim.now)
    sim.plan()
    why = [(answer.status, answer.text) for answer in sim.answers]
    assert why == [
        (409, "request 'reads' ends here with its prompt"),
        (409, "request 'generates' is being moved already"),
    ]
