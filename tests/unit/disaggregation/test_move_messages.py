"""What a peer says of a request that it wants to be rid of: taken where it means something, refused where not."""

from __future__ import annotations

import math

import msgspec
import pytest
from support.handovers import named
from support.sim import make_generate

from pdserve.disaggregation.handover.control.frames import FRAME_MESSAGES
from pdserve.messages.base import pack_i32
from pdserve.messages.channel import encode
from pdserve.messages.decode import Codec, UndeclaredMessage
from pdserve.messages.moves import MoveCommit, MoveOffer, MoveReady, MoveRefused, MoveTaken, RunningRequest, problem_of
from pdserve.messages.outputs import Timing
from pdserve.messages.peer import PeerMessage
from pdserve.messages.requests import MAX_TOP_LOGPROBS, LogprobOptions

VOCAB = 200
RUNNING = RunningRequest(make_generate("a", [1, 2, 3]), pack_i32([4, 5]), 8, 1.5)
OFFER = MoveOffer("e", named(7, attempt=0), RUNNING, 16)
COMMIT = MoveCommit("e", named(7, attempt=0), pack_i32([6]), 0, 0, 0.5, Timing())
SAID = [
    OFFER,
    MoveReady("e", named(7)),
    COMMIT,
    MoveTaken("e", named(7), "k" * 32, 30000),
    MoveRefused("e", named(7), "why"),
]


def changed(**request) -> RunningRequest:
    return msgspec.structs.replace(RUNNING, request=msgspec.structs.replace(RUNNING.request, **request))


def sampling(**fields) -> RunningRequest:
    return changed(sampling=msgspec.structs.replace(RUNNING.request.sampling, **fields))


def test_what_peers_say_of_moves_comes_through():
    assert Codec(PeerMessage, 1 << 20, FRAME_MESSAGES).decode(encode(SAID)) == SAID
    assert problem_of(RUNNING, VOCAB) is None


@pytest.mark.parametrize(
    "running",
    [
        changed(input_ids=b""),
        changed(input_ids=b"abc"),
        changed(input_ids=pack_i32([VOCAB])),
        changed(input_ids=pack_i32([-1])),
        msgspec.structs.replace(RUNNING, output=pack_i32([VOCAB])),
        msgspec.structs.replace(RUNNING, output=b"x"),
        changed(rid="r" * 2000),
        changed(extra_key="k" * 2000),
        changed(rid="forged\nline"),
        changed(key_name="\x1b[2J"),
        changed(logprobs=LogprobOptions(0, MAX_TOP_LOGPROBS + 1)),
        changed(stop_ids=(VOCAB,)),
        changed(stop_ids=tuple(range(VOCAB)) * 50),
        changed(logprobs=LogprobOptions(-2, 0)),
        changed(logprobs=LogprobOptions(0, VOCAB + 1)),
        sampling(seed=-1),
        sampling(seed=1 << 63),
        sampling(max_new_tokens=0),
        sampling(max_new_tokens=1 << 40),
        sampling(min_new_tokens=-1),
        sampling(top_k=-2),
        sampling(top_p=math.nan),
        sampling(top_p=2.0),
        sampling(min_p=-0.1),
        sampling(temperature=math.inf),
        sampling(temperature=math.nan),
        sampling(repetition_penalty=0.0),
        sampling(frequency_penalty=math.inf),
        sampling(temperature=1e30),
        sampling(presence_penalty=-2.5),
        sampling(frequency_penalty=1e30),
        sampling(repetition_penalty=1e-30),
        sampling(repetition_penalty=1e30),
        sampling(logit_bias={1: 1e30}),
        sampling(stop=("a",) * 33),
        sampling(stop=("a" * 1025,)),
        sampling(logit_bias={VOCAB: 1.0}),
        sampling(logit_bias={1: math.nan}),
    ],
)
def test_what_means_nothing_is_refused(running):
    assert problem_of(running, VOCAB) is not None


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (OFFER, {"kv_len": -1}),
        (OFFER, {"kv_len": 1 << 40}),
        (COMMIT, {"cached_tokens": -1}),
        (COMMIT, {"first_token_age": math.nan}),
        (COMMIT, {"timing": Timing(queue_ms=math.inf)}),
        (SAID[3], {"key": "short"}),
        (SAID[3], {"port": 0}),
        (SAID[4], {"reason": "r" * 5000}),
    ],
)
def test_fields_out_of_bounds_are_refused(message, changes):
    bad = msgspec.structs.replace(message)
    for name, value in changes.items():
        setattr(bad, name, value)
    with pytest.raises(UndeclaredMessage):
        Codec(PeerMessage, 1 << 20, FRAME_MESSAGES).decode(encode([bad]))
