"""Requests that move here, up to when they run: what is refused, and how they end before that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.handovers import named
from support.sim import VOCAB, make_generate, reference_output
from support.sim_pair import LIMITS, SimPair, SimSide, assert_all_returned, make_peer

from pdserve.disaggregation.handover.kv_receiver import ReceiverState
from pdserve.disaggregation.handover.migration.migration_target import MigrationTarget
from pdserve.disaggregation.handover.peer import Reading
from pdserve.messages.base import pack_i32
from pdserve.messages.handover import FirstToken, Withdrawn
from pdserve.messages.moves import MoveCommit, MoveOffer, MoveReady, MoveRefused, MoveTaken, ReqArrived, RunningRequest
from pdserve.messages.outputs import FinishType, Timing, TokenLogprob
from pdserve.messages.requests import AbortReq, LogprobOptions
from pdserve.runtime.answer_keys import AnswerKeys

PROMPT = list(range(2, 10))
OUTPUT = reference_output(PROMPT, 8)
ROOM = named(7, epoch="decode")
HERE = "a@0000000000000007"
"""What the request is called here."""


class Target(SimSide):
    """An instance that requests move to, from ``mover``."""

    def __init__(self, pair: SimPair, **changes: Any) -> None:
        super().__init__(pair, "decode", SimpleNamespace(window=0, tokens=0), **changes)
        peers: Any = SimpleNamespace(want=lambda peer, now: None)
        others = (self.scheduler, LIMITS, peers, self.receivers, 30000, AnswerKeys())
        self.moves_in = MigrationTarget(*others, knows_peers=True)
        self.mover = make_peer("mover", reading=Reading.READY)

    def cancel(self, req, reason) -> None:
        """See ``KVManager``."""
        self.moves_in.cancel(req, reason)
        super().cancel(req, reason)

    def offer(self, *, keep: bool = False, output: int = 2, kv_len: int = 0, **request: Any) -> None:
        """Offer the mover's request to this side, which checks it."""
        msg = msgspec.structs.replace(make_generate("a", PROMPT), **request)
        running = RunningRequest(msg, pack_i32(OUTPUT[:output]), 8, 0.5)
        self.scheduler.now = self.now
        self.moves_in.on_offer(self.mover, MoveOffer("decode", ROOM, running, kv_len, keep), self.now)

    def commit(self, tokens: int = 1, **changes: Any) -> None:
        """Stop the request at the mover, which has computed ``tokens`` more."""
        more = pack_i32(OUTPUT[2 : 2 + tokens])
        commit = MoveCommit("decode", ROOM, more, 0, 0, 0.5, Timing())
        self.moves_in.on_commit(self.mover, msgspec.structs.replace(commit, **changes), self.now)
        self.outbox.flush()
        self._read()

    def said(self) -> list[type]:
        """Kinds of what the mover was told since the last time."""
        said, self.mover.unsent = [type(message) for message in self.mover.unsent], []
        return said


@pytest.fixture
def target() -> Target:
    pair = SimPair()
    pair.decode = Target(pair)
    return pair.decode


def test_a_request_that_was_offered_goes_on_here(target: Target) -> None:
    target.offer()
    assert target.said() == [MoveReady]
    target.commit()
    assert target.said() == [MoveTaken]
    assert [type(answer) for answer in target.answers] == [ReqArrived]
    target.run_until_idle()
    assert target.tokens == {HERE: OUTPUT}
    assert_all_returned(target.pair)


@pytest.mark.parametrize("output", [0, 2])
@pytest.mark.parametrize("end", ["deadline", "abort", "abort of all"])
@pytest.mark.parametrize("kv_len", [0, 8], ids=["ready", "landing"])
def test_a_request_that_ends_on_its_way_is_refused_and_no_client_is_told(target, end, output, kv_len) -> None:
    """This instance's HTTP process has not heard of it."""
    target.offer(output=output, kv_len=kv_len, timeout_s=20.0)
    assert target.said() == ([] if kv_len else [MoveReady])
    target.pair.advance()
    if end == "deadline":
        target.now += 20.0
        target.scheduler.run_steps(target.now)
    else:
        target.scheduler.abort(AbortReq(HERE if end == "abort" else ""))
    target.outbox.flush()
    assert not target.to_detokenizer.messages
    assert MoveRefused in target.said()
    assert target.scheduler.counters.moved == 1
    assert not target.scheduler.reqs
    target.commit()
    assert target.said() == [MoveRefused]
    assert not target.answers


def test_a_migrating_request_takes_no_first_token_and_keeps_its_memory(target: Target) -> None:
    """It has output already, and its sender has begun."""
    target.offer(kv_len=8)
    target.pair.advance()
    room = target.receivers.rooms[7]
    assert room.state is ReceiverState.TRANSFERRING
    target.scheduler.planner.claims.reservations[HERE].asked_back = True
    for message in (FirstToken("decode", ROOM, 5, 0, Timing()), Withdrawn("decode", ROOM, begun=False)):
        target.receivers.handlers()[type(message)](target.mover, message, target.now)
    assert (room.state, room.handover, room.req.output_len) == (ReceiverState.TRANSFERRING, ROOM, 2)


def test_kv_of_a_request_that_is_over_is_no_clients_either(target: Target) -> None:
    target.offer(keep=True, output=0, kv_len=8)
    target.scheduler.abort(AbortReq(""))
    target.outbox.flush()
    assert not target.to_detokenizer.messages
    assert not target.scheduler.reqs


def test_the_deadline_of_a_request_that_has_arrived_ends_it_with_a_timeout(target: Target) -> None:
    target.offer(timeout_s=20.0)
    target.commit()
    target.now += 20.0
    target.plan()
    assert target.ends[HERE].finish.type is FinishType.TIMEOUT


GOOD = [TokenLogprob(token, -0.5) for token in OUTPUT[:3]]
SCORES = [TokenLogprob(token, -0.5) for token in PROMPT]


def test_the_end_of_a_request_searches_no_arrivals(target: Target) -> None:
    class NoScan(dict):
        def values(self):
            raise AssertionError("all arrivals are searched for one")

    target.offer()
    target.moves_in._arrivals = NoScan(target.moves_in._arrivals)
    target.scheduler.arrivals.admit(make_generate("local", range(9)), target.now)
    for rid in ("local", HERE):
        target.scheduler.abort(AbortReq(rid))
    assert not target.moves_in._arrivals


def bad(scores: list[TokenLogprob], **changes: Any) -> list[TokenLogprob]:
    return [*scores[:-1], msgspec.structs.replace(scores[-1], **changes)]


@pytest.mark.parametrize(
    "scores",
    [
        {"logprobs": []},
        {"logprobs": GOOD[:2]},
        {"logprobs": [*GOOD, GOOD[0]]},
        {"logprobs": bad(GOOD, token_id=VOCAB)},
        {"logprobs": bad(GOOD, token_id=-1)},
        {"logprobs": bad(GOOD, logprob=1.0)},
        {"logprobs": bad(GOOD, top=[(VOCAB, -1.0)])},
        {"logprobs": GOOD, "input_logprobs": [*SCORES, SCORES[0]]},
        {"logprobs": GOOD, "input_logprobs": bad(SCORES, logprob=float("nan"))},
    ],
)
def test_logprobs_that_are_none_or_not_of_the_output_are_refused(target: Target, scores) -> None:
    target.offer(logprobs=LogprobOptions(0, 1))
    target.said()
    target.commit(**scores)
    assert target.said() == [MoveRefused]
    assert not target.scheduler.reqs
    assert not target.answers


def test_logprobs_of_the_output_are_sent(target: Target) -> None:
    target.offer(logprobs=LogprobOptions(0, 1))
    target.commit(logprobs=list(GOOD), input_logprobs=SCORES)
    target.run_until_idle()
    sent_scores = [score for item in target.items[HERE] for score in item.logprobs]
    assert sent_scores[:3] == GOOD
    assert len(sent_scores) == len(OUTPUT)


def test_logprobs_that_were_not_asked_for_are_refused(target: Target) -> None:
    target.offer()
    target.said()
    target.commit(logprobs=GOOD)
    assert target.said() == [MoveRefused]


@pytest.mark.parametrize(
    ("kv_len", "output", "taken"), [(8, 0, True), (4, 0, False), (0, 0, False), (8, 2, False), (12, 4, False)]
)
def test_returned_kv_is_that_of_all_tokens_that_come_with_it(target: Target, kv_len, output, taken) -> None:
    target.offer(keep=True, kv_len=kv_len, output=output)
    assert target.said() == ([] if taken else [MoveRefused])
    assert len(target.scheduler.reqs) == taken
