"""Requests that are written down and go on, over the simulated model: the same tokens, from right KV or from none."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from support.sim import SimInstance, make_generate, reference_output
from support.sim_tiers import TieredSim

from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.outputs import ReqError
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.requests import AbortReq
from pdserve.messages.sessions import ReleaseReq, ResumeReq, SessionState, SnapshotReq, SnapshotResult
from pdserve.scheduler import ended_requests, store_link
from pdserve.scheduler.features import sessions as sessions_module
from pdserve.scheduler.kept_pages import MOST_SECONDS
from pdserve.scheduler.req import ReqState, Route


@pytest.fixture(autouse=True)
def _small_fetches(monkeypatch):
    monkeypatch.setattr(store_link, "LEAST_FETCH", 4)


def prompt(seed: int, length: int = 30) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def run_until(sim: SimInstance, rid: str, tokens: int) -> None:
    """Run until the client has ``tokens`` tokens."""
    for _ in range(1000):
        if len(sim.tokens.get(rid, [])) >= tokens:
            return
        sim.plan()
        if not sim.work() and isinstance(sim, TieredSim):
            sim.serve_store()
    raise AssertionError(f"{rid} has {sim.tokens.get(rid)}")


def snapshot(sim: SimInstance, rid: str, *, with_output: bool = True) -> Any:
    """Ask, and turn until it is answered; the store does what it is told."""
    sim.tell(SnapshotReq(rid, with_output, 1e10, id=len(sim.answers) + 1))
    for _ in range(1000):
        sim.plan()
        if sim.answers:
            return sim.answers.pop()
        if not sim.work() and isinstance(sim, TieredSim):
            sim.serve_store()
    raise AssertionError("no answer")


def resume(sim: SimInstance, state: SessionState, rid: str) -> None:
    """Go on with it under another name."""
    request = msgspec.structs.replace(state.running.request, rid=rid, arrival=sim.now)
    running = msgspec.structs.replace(state.running, request=request)
    sim.tell(ResumeReq(msgspec.structs.replace(state, running=running)))
    sim.settle() if isinstance(sim, TieredSim) else sim.run_until_idle()


@pytest.mark.parametrize("output", [1, 9, 19])
def test_a_running_request_goes_on_elsewhere_from_the_store(output):
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=20, logprobs=(0, 0))
    run_until(sim, "a", output)
    saved = snapshot(sim, "a")
    known = 30 + len(saved.state.running.output) // 4
    assert saved.kv_tokens == (known - 1) // 4 * 4
    assert saved.kv_bytes == saved.kv_tokens * 8
    sim.settle()  # it goes on where it is, undisturbed
    assert sim.tokens["a"] == reference_output(prompt(1), 20)
    other = TieredSim(200, kept=sim.store.kept)
    resume(other, saved.state, "again")
    assert other.tokens["again"] == sim.tokens["a"]
    assert other.ends["again"].meta.cached_tokens == saved.kv_tokens
    scores = [score for item in other.items["again"] for score in item.logprobs or []]
    assert scores == [score for item in sim.items["a"] for score in item.logprobs or []]
    assert other.items["again"][0].prompt == sim.items["a"][0].prompt


def test_of_a_prompt_that_is_half_computed_no_more_is_kept_than_there_is():
    sim = TieredSim(200, hicache_storage_prefetch_policy="best_effort", disable_overlap_schedule=True)
    sim.submit("a", prompt(1, 64), max_new_tokens=20)
    sim.plan()  # its first piece of 16
    sim.tell(SnapshotReq("a", True, 1e10, id=1))
    while not sim.answers:
        sim.scheduler._move_pages(sim.now)
        sim.outbox.flush()
        sim._read()
        assert sim.work() or sim.serve_store() or sim.answers
    [saved] = sim.answers
    assert (saved.kv_tokens, saved.state.running.output) == (16, b"")
    other = TieredSim(200, kept=dict(sim.store.kept))
    resume(other, saved.state, "again")
    assert other.tokens["again"] == reference_output(prompt(1, 64), 20)


def test_it_is_computed_again_without_a_store_and_from_a_bad_one():
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=20)
    run_until(sim, "a", 10)
    saved = snapshot(sim, "a")
    sim.settle()
    for page_hash, framed in sim.store.kept.items():
        sim.store.kept[page_hash] = framed[:-1] + bytes([framed[-1] ^ 1])
    plain = SimInstance()
    for other in (TieredSim(200, kept=sim.store.kept), TieredSim(200), plain):
        resume(other, saved.state, "again")
        assert other.tokens["again"] == sim.tokens["a"]
        assert other.ends["again"].meta.cached_tokens == 0
    plain.submit("b", prompt(2))
    run_until(plain, "b", 3)
    said = snapshot(plain, "b")
    assert (type(said), said.kv_tokens) == (SnapshotResult, 0)
    assert "--hicache-storage-backend" in said.message


def test_other_pages_than_ours_are_not_looked_for():
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=20)
    run_until(sim, "a", 10)
    saved = snapshot(sim, "a")
    sim.settle()
    other = TieredSim(200, kept=sim.store.kept, page_size=8)
    resume(other, saved.state, "again")
    assert other.tokens["again"] == sim.tokens["a"]
    assert other.ends["again"].meta.cached_tokens == 0


def test_what_has_ended_lately_can_be_kept_and_its_prompt_alone():
    sim = TieredSim(200)
    sim.submit("a", prompt(1, 31), max_new_tokens=12)
    sim.submit("left", prompt(2), max_new_tokens=12)
    run_until(sim, "left", 4)
    sim.scheduler.abort(AbortReq("left"))
    sim.settle()
    whole, start, left = snapshot(sim, "a"), snapshot(sim, "a", with_output=False), snapshot(sim, "left")
    assert unpack_i32(whole.state.running.output).tolist() == sim.tokens["a"]
    assert whole.kv_tokens == 40
    assert (start.state.running.output, start.kv_tokens) == (b"", 28)
    resume(sim, start.state, "anew")
    resume(sim, left.state, "left again")
    assert sim.tokens["anew"] == sim.tokens["a"]
    assert sim.tokens["left again"] == reference_output(prompt(2), 12)
    resume(sim, whole.state, "over")
    assert (sim.ends["over"].status, "its answer has ended" in sim.ends["over"].message) == (409, True)
    assert snapshot(sim, "nobody").status == 404


def test_a_prefills_leg_is_its_decodes_and_unchecked_kv_stays_out_of_the_store():
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=12)
    run_until(sim, "a", 3)
    req = sim.scheduler.reqs["a"]
    req.hold.verified = False
    unchecked = snapshot(sim, "a")
    assert (type(unchecked), unchecked.state is not None, unchecked.kv_tokens) == (SnapshotResult, True, 0)
    req.hold.verified = True
    req.route = Route.OUTGOING
    said = snapshot(sim, "a")
    assert (said.status, "ask that one" in said.text) == (409, True)
    sim.scheduler.leave(req, ReqState.FINISHED)
    assert snapshot(sim, "a").status == 404


def test_a_session_holds_so_much_and_no_more(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_ENDED_TOKENS", 100)
    sim = SimInstance()
    sim.submit("a", prompt(1), max_new_tokens=12, logprobs=(-1, 5))
    run_until(sim, "a", 3)
    assert snapshot(sim, "a").status == 413


def test_what_has_ended_is_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(ended_requests, "MAX_ENDED_TOKENS", 100)
    sim = SimInstance()
    for name in "abc":
        sim.submit(name, prompt(1), max_new_tokens=12)
        sim.run_until_idle()
    assert [getattr(snapshot(sim, name), "status", 200) for name in "abc"] == [404, 200, 200]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": "another"}, "another model's"),
        ({"output": pack_i32([97])}, "tokens outside the vocabulary"),
        ({"logprobs": [[1, -1.0]]}, "logprobs are not"),
    ],
)
def test_what_can_not_be_is_refused(change, says):
    sim = SimInstance()
    sim.submit("a", prompt(1), max_new_tokens=20)
    run_until(sim, "a", 10)
    state = snapshot(sim, "a").state
    if output := change.pop("output", None):
        change["running"] = msgspec.structs.replace(state.running, output=output)
    resume(sim, msgspec.structs.replace(state, **change), "again")
    end = sim.ends["again"]
    assert isinstance(end, ReqError)
    assert end.status == 409
    assert says in end.message


def test_a_store_that_hangs_or_is_dead_costs_the_kv_and_not_the_answer():
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=20)
    run_until(sim, "a", 10)
    sim.tell(SnapshotReq("a", True, 1e10, id=1))
    for _ in range(30):
        sim.plan()
        sim.work()
    assert not sim.answers
    assert 0 < sim.tiers.store.timeout(sim.now) < MOST_SECONDS
    sim.now += MOST_SECONDS
    sim.plan()
    [answer] = sim.answers
    assert (answer.state is not None, answer.kv_tokens, "20 s" in answer.message) == (True, 0, True)
    sim.answers.clear()
    sim.settle()
    sim.store.dead = True
    sim.submit("b", prompt(2), max_new_tokens=20)
    run_until(sim, "b", 10)
    sim.tell(SnapshotReq("b", True, 1e10, id=2))
    for _ in range(200):
        sim.now += 0.2
        sim.plan()
        sim.work() or sim.serve_store()
    [answer] = sim.answers
    assert (answer.state is not None, answer.kv_tokens, bool(answer.message)) == (True, 0, True)


def test_what_the_store_lost_is_sent_again_and_released_in_the_end():
    sim = TieredSim(200)
    sim.submit("a", prompt(1), max_new_tokens=2)
    sim.settle()
    lost = list(sim.store.kept)[2:]
    for page_hash in lost:
        del sim.store.kept[page_hash]
    assert snapshot(sim, "a").kv_tokens == 28
    assert set(lost) <= set(sim.store.kept)
    wishes: list[tuple[int, float]] = []
    sim.store.keep = lambda hashes, until: wishes.append((len(hashes), until)) or len(hashes)
    sim.tell(ReleaseReq(pack_i32(prompt(1)), "", 9))
    sim.settle()
    assert wishes == [(5, 0.0)]


def test_a_name_that_another_key_had_is_not_its_request():
    sim = TieredSim(200)
    msg = make_generate("a", prompt(1), max_new_tokens=4)
    msg.key_name = "alice"
    sim.scheduler.arrivals.admit(msg, sim.now)
    run_until(sim, "a", 2)
    for _ in range(2):  # while it runs, and when it has ended
        for key_name, status in (("bob", 404), ("", 404), ("alice", 200), (None, 200)):
            sim.tell(SnapshotReq("a", True, 1e10, key_name, id=1))
            while not sim.answers:
                sim.plan()
                _ = sim.work() or sim.serve_store()
            said = sim.answers.pop()
            assert getattr(said, "status", 200) == status
            assert isinstance(said, RefusedAnswer if status == 404 else SnapshotResult)
        sim.settle()


def test_what_the_host_has_of_an_ended_request_is_kept_as_well():
    sim = TieredSim(200, max_total_tokens=64)
    sim.submit("a", prompt(1), max_new_tokens=4)
    sim.settle()
    sim.submit("b", prompt(2, 56), max_new_tokens=4)  # takes the pool
    sim.settle()
    assert len(sim.scheduler.memory.pages_with_kv(None, np.array(prompt(1), dtype=np.int32), "")) < 7
    saved = snapshot(sim, "a")
    assert (saved.kv_tokens, saved.message) == (32, "")


def test_a_session_goes_to_the_store_before_what_waits_for_it() -> None:
    sim = TieredSim(800, hicache_storage_prefetch_policy="best_effort")
    for i in range(40):
        sim.submit(f"r{i}", prompt(i + 1, 60))
        sim.run_until_idle()  # the store has not been heard since
    assert len(sim.scheduler.tiers.store.backlog) > 0
    last = snapshot(sim, "r39")
    assert last.kv_tokens >= 60
    assert len(sim.scheduler.tiers.store.backlog) > 0  # of those that came before it
