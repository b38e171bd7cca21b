"""Requests that read a vector from their prompt, over the simulated worker."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.sim import SimInstance, make_generate, make_options

from pdserve.messages.outputs import FinishType, ReqError, ReqTokens
from pdserve.messages.readout import Readout, ReadoutSpec
from pdserve.messages.requests import Bootstrap
from pdserve.messages.sessions import SnapshotReq
from pdserve.messages.worker import ForwardStep

MEAN, LAST, LABELS = Readout("mean"), Readout("last"), Readout("labels", (5, 7))


def specs(sim: SimInstance, rid: str, readout: Readout, length: int = 40) -> list[list[ReadoutSpec]]:
    """Serve a prompt in steps of 16 tokens, and return the readouts of each step."""
    seen: list[list[ReadoutSpec]] = []
    run = sim.worker.run

    def recording(step: ForwardStep):
        seen.append(step.readouts)
        return run(step)

    sim.worker.run = recording
    sim.submit(rid, range(length), max_new_tokens=1, readout=readout)
    sim.run_until_idle()
    return seen


def end_of(sim: SimInstance, rid: str) -> ReqTokens:
    end = sim.ends[rid]
    assert isinstance(end, ReqTokens), end
    return end


def test_a_mean_is_read_in_every_step_of_its_prompt() -> None:
    sim = SimInstance()
    found = specs(sim, "a", MEAN)
    assert [[(s.entry, s.kind, s.is_last) for s in step] for step in found] == [
        [(0, "mean", False)],
        [(0, "mean", False)],
        [(0, "mean", True)],
    ]
    assert np.frombuffer(end_of(sim, "a").prompt.readout, "<f4")[1] == 0.5
    assert end_of(sim, "a").finish.type is FinishType.LENGTH


@pytest.mark.parametrize("readout", [LAST, LABELS])
def test_others_are_read_at_the_prompts_end_alone(readout: Readout) -> None:
    sim = SimInstance()
    found = specs(sim, "a", readout)
    assert [len(step) for step in found] == [0, 0, 1]
    assert found[-1][0].labels == np.int32(readout.labels).tobytes()
    assert end_of(sim, "a").prompt.readout


def test_only_a_mean_computes_a_cached_prefix_again() -> None:
    sim = SimInstance()
    for rid, readout in (("a", MEAN), ("b", LAST), ("c", MEAN), ("d", LABELS)):
        sim.submit(rid, range(40), max_new_tokens=1, readout=readout)
        sim.run_until_idle()
    assert [end_of(sim, rid).meta.cached_tokens for rid in "abcd"] == [0, 36, 0, 36]
    sim.scheduler.check_invariants()


def test_a_request_that_moves_from_elsewhere_is_refused() -> None:
    """Its sum may have begun there."""
    sim = SimInstance()
    msg = make_generate("a", range(4), max_new_tokens=2, readout=MEAN)
    assert "stays where it is" in sim.scheduler.arrivals.admit_moved(msg, np.zeros(0, np.int32), 2)


def test_a_request_without_an_answer_is_not_saved() -> None:
    sim = SimInstance()
    sim.submit("a", range(40), max_new_tokens=1, readout=MEAN)
    sim.plan()
    sim.tell(SnapshotReq("a", True, 1e10, id=1))
    sim.run_until_idle()
    sim.tell(SnapshotReq("a", True, 1e10, id=2))
    sim.run_until_idle()
    assert [(answer.status, "no answer" in answer.text) for answer in sim.answers] == [(409, True)] * 2


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    sim = SimInstance()
    sim.submit("a", range(4), max_new_tokens=1, readout=Readout("labels", (96, 97)))
    sim.run_until_idle()
    error = sim.ends["a"]
    assert isinstance(error, ReqError)
    assert (error.status, error.field) == (400, "label_token_ids")


def test_a_hand_over_of_a_readout_is_refused() -> None:
    sim = SimInstance(make_options())
    msg = make_generate("a", range(4), max_new_tokens=1, readout=LAST)
    sim.scheduler.arrivals.admit(msgspec.structs.replace(msg, bootstrap=Bootstrap("p", 1, 2)), sim.now)
    sim.run_until_idle()
    error = sim.ends["a"]
    assert isinstance(error, ReqError)
    assert (error.status, error.field) == (400, "bootstrap_host")
