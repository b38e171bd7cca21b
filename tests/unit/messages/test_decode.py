"""Whatever a frame holds: messages, or a refusal, and nothing else; what is logged of it."""

from __future__ import annotations

import contextlib
import logging
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.handovers import named
from support.layouts import uniform_layout
from support.strangers import huge_length, junk, nested, spoil

from pdserve.disaggregation.handover.control.frames import (
    FRAME_MESSAGES,
    LONG_FRAME_BYTES,
    SHORT_FRAME_BYTES,
    make_frames,
)
from pdserve.messages.base import Message
from pdserve.messages.channel import encode
from pdserve.messages.control import Drain
from pdserve.messages.decode import SHOWN_CHARS, Codec, UndeclaredMessage, decode, shown
from pdserve.messages.handover import (
    Abort,
    Declined,
    FirstToken,
    Forecast,
    ForecastRequest,
    Heartbeat,
    Hello,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
)
from pdserve.messages.outputs import Timing, TokenLogprob
from pdserve.messages.peer import PeerMessage
from pdserve.messages.worker import KVLayout, SliceChecksum
from pdserve.runtime import refusal_log
from pdserve.runtime.refusal_log import RefusalLog
from pdserve.scheduler.options import DEFAULT_MAX_LOGPROBS

LAYOUT = uniform_layout(page_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float32", page_bytes=4096)
REQUEST = TransferRequest("e", named(7), 30, 1 << 63, 16, [b"\1\0\0\0"])
LONGEST = named((1 << 63) - 1, (1 << 63) - 1, "D" * 128)
HONEST = [
    Hello("e", "d", 1, 1, "f", LAYOUT, "tcp", b"m"),
    RoomQueued("e", named(7)),
    ForecastRequest("e", named(7)),
    Forecast("e", named(7), 12.5),
    Declined("e", named(7)),
    REQUEST,
    Abort("e", named(7), "why"),
    Heartbeat("e"),
]
LIMIT = 1 << 20


@pytest.fixture
def codec():
    return Codec(PeerMessage, LIMIT, FRAME_MESSAGES)


def test_honest_frames_come_through(codec):
    assert codec.decode(encode(HONEST)) == HONEST
    assert codec.decode(memoryview(encode([]))) == []


class Awkward(Message):
    """A message with a check of its own that fails in ways that msgspec does not turn into its errors."""

    kind: int

    def __post_init__(self):
        raise (RecursionError, MemoryError, OverflowError, KeyError, ValueError, UnicodeError)[self.kind]("no")


@pytest.mark.parametrize("kind", range(6))
def test_any_exception_of_decoding_is_a_refusal(kind):
    frame = msgspec.msgpack.encode([{"type": "Awkward", "kind": kind}])
    with pytest.raises(UndeclaredMessage):
        Codec(Awkward, LIMIT).decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x81\xa1\xff\x01",
        b"\x91\x82\xa4type\xa9Heartbeat\xa5epoch\xa3\xff\xfe\xfd",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        encode(HONEST)[:-1],
        encode(HONEST) + b"\0",
        encode([Drain()]),
        b"\x90" + bytes(LIMIT),
        encode([Heartbeat("e")] * (FRAME_MESSAGES + 1)),
    ],
)
def test_what_is_no_frame_is_refused(codec, frame):
    with pytest.raises(UndeclaredMessage):
        codec.decode(frame)


def changed(message, **fields):
    return msgspec.msgpack.encode([msgspec.to_builtins(message, builtin_types=(bytes,)) | fields])


DONE = TransferDone("e", named(7), [SliceChecksum(0, 1, 0, 1, 1)], Timing())


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (REQUEST, {"handover": ["D", -1, 1]}),
        (REQUEST, {"handover": ["D", 1 << 63, 1]}),
        (REQUEST, {"handover": ["D", 7, -1]}),
        (REQUEST, {"handover": ["D", 7, 1 << 63]}),
        (REQUEST, {"handover": ["D" * 129, 7, 1]}),
        (REQUEST, {"handover": ["D", 7]}),
        (REQUEST, {"handover": ["D", 7, 1, 1]}),
        (REQUEST, {"handover": 7}),
        (REQUEST, {"prompt_len": 1 << 31}),
        (REQUEST, {"prompt_len": -1}),
        (REQUEST, {"decode_prefix_len": -16}),
        (REQUEST, {"prompt_digest": -1}),
        (REQUEST, {"dst_pages": [b"\1\0\0"]}),
        (REQUEST, {"dst_pages": [b"\1\0\0\0", b"\1\0\0"]}),
        (REQUEST, {"dst_pages": []}),
        (REQUEST, {"dst_pages": [b""] * 9}),
        (REQUEST, {"dst_pages": [bytes(1 << 20), bytes(4)]}),
        (REQUEST, {"dst_pages": [bytes((1 << 20) + 4)]}),
        (REQUEST, {"epoch": "x" * 129}),
        (HONEST[0], {"metadata": bytes(4097)}),
        (HONEST[0], {"sender": ""}),
        (HONEST[0], {"fingerprint": "x" * 129}),
        (HONEST[0], {"layout": msgspec.to_builtins(LAYOUT) | {"dtype": "x" * 1000}}),
        (HONEST[3], {"reason": "x" * 5000}),
        (TransferFailed("e", named(7), 503, "why"), {"status": 200}),
        (FirstToken("e", named(7), 1, 0, Timing()), {"token": 1 << 31}),
        (FirstToken("e", named(7), 1, 0, Timing()), {"cached_tokens": -1}),
        (FirstToken("e", named(7), 1, 0, Timing()), {"handover": ["D", -1, 1]}),
        (DONE, {"slices": [[0, 1, 0, 1, -1]]}),
        (DONE, {"slices": [[0, 0, 0, 1, 1]]}),
        (DONE, {"slices": [[0, 1, 0, 1 << 13, 1]]}),
        (DONE, {"slices": [[0, 1, 0, 1]]}),
        (DONE, {"timing": {"queue_ms": float("nan")}}),
        (DONE, {"timing": {"transfer_bytes": 1 << 41}}),
        (DONE, {"timing": {"timeline": {"queue": float("nan")}}}),
        (DONE, {"timing": {"timeline": {"last_byte": float("inf")}}}),
    ],
)
def test_numbers_and_texts_out_of_all_bounds_are_refused(message, fields):
    codec = Codec(PeerMessage, 2 * LIMIT)
    assert codec.decode(changed(message)) == [message]
    with pytest.raises(UndeclaredMessage):
        codec.decode(changed(message, **fields))


@given(st.integers(0, 2**32))
def test_spoiled_frames_are_refused_or_mean_something_declared(seed):
    rng = random.Random(seed)
    codec = Codec(PeerMessage, LIMIT)
    fields = msgspec.to_builtins(rng.choice([*HONEST, DONE]), builtin_types=(bytes,))
    fields[rng.choice(sorted(fields))] = junk(rng)
    for frame in (spoil(rng, encode(HONEST)), msgspec.msgpack.encode([fields]), nested(rng), huge_length(rng)):
        with contextlib.suppress(UndeclaredMessage):
            messages = codec.decode(frame)
            assert all(isinstance(m, Message) for m in messages)
            encode(messages)  # whatever came through can be passed on


def test_json_bodies_take_the_same_door():
    decoder = msgspec.json.Decoder(KVLayout)
    assert decode(decoder, msgspec.json.encode(LAYOUT), LIMIT) == LAYOUT
    for body in (b'"\xff"', b"[" * 100_000, b"{", msgspec.json.encode(LAYOUT) + bytes(LIMIT)):
        with pytest.raises(UndeclaredMessage):
            decode(decoder, body, LIMIT)


def test_a_strangers_words_fit_one_line():
    assert shown("a\nb\x1b[31m\u202ec") == "a\ufffdb\ufffd[31m\ufffdc"
    assert len(shown("x" * 10**6)) == SHOWN_CHARS + 1
    with pytest.raises(UndeclaredMessage) as caught:
        Codec(PeerMessage, 2 * LIMIT).decode(msgspec.msgpack.encode([{"type": "x" * LIMIT}]))
    assert len(str(caught.value)) < SHOWN_CHARS + 100


def test_refusals_are_counted_and_the_log_stays_short(caplog, monkeypatch):
    now = [0.0]
    refusals = RefusalLog(logging.getLogger("door"), "at the door", clock=lambda: now[0])
    for i in range(1000):
        refusals.add(f"no {i}\n{'x' * 1000}")
    assert refusals.total == 1000
    assert len(caplog.records) == refusal_log.LINES
    now[0] += refusal_log.SECONDS
    refusals.add("again")
    lines = [record.getMessage() for record in caplog.records[refusal_log.LINES :]]
    assert lines == ["at the door: 990 more like these, 1001 in all", "at the door: again"]
    assert max(len(record.getMessage()) for record in caplog.records) < SHOWN_CHARS + 20


def test_what_is_sent_stays_within_the_receivers_limits():
    pages = bytes(4 << 18)
    requests = [TransferRequest("e", named(i), 1, 1, 0, [pages[: 4 * i]]) for i in range(0, 4 * FRAME_MESSAGES, 2)]
    frames, too_long = make_frames([*requests, *[Heartbeat("e")] * 3000], SHORT_FRAME_BYTES)
    codec = Codec(PeerMessage, SHORT_FRAME_BYTES, FRAME_MESSAGES)
    assert [m for frame in frames for m in codec.decode(frame)] == [*requests, *[Heartbeat("e")] * 3000]
    assert too_long == []
    longest = TransferRequest("e" * 128, LONGEST, (1 << 31) - 1, (1 << 64) - 1, (1 << 31) - 1, [pages])
    (frame,), too_long = make_frames([longest], SHORT_FRAME_BYTES)
    assert codec.decode(frame) == [longest]
    done = TransferDone("e", named(7), [SliceChecksum(0, 1, 0, 1, 1)], Timing())
    assert make_frames([done, done], 20) == ([], [done, done])
    assert make_frames([], 20) == ([], [])


def logprobs(body: bytes, count: int) -> bytes:
    """Return a frame of a ``FirstToken`` with ``body`` as its list of prompt log-probabilities."""
    first = FirstToken("e" * 128, LONGEST, 5, 0, Timing(), None, [])
    before, name, after = encode([first]).partition(b"input_logprobs")
    return before + name + b"\xdd" + count.to_bytes(4, "big") + body + after[1:]


@pytest.mark.parametrize("alternatives", [0, 1, 5, 128])
def test_four_times_the_log_probabilities_that_a_request_gets_by_default_fit_into_a_frame(alternatives):
    one = TokenLogprob((1 << 32) - 1, -1.5, [((1 << 32) - 1, -1.5)] * alternatives)
    count = 4 * DEFAULT_MAX_LOGPROBS // (1 + alternatives)
    assert len(logprobs(b"", 0)) + count * len(msgspec.msgpack.encode(one)) < LONG_FRAME_BYTES


def test_the_densest_frame_takes_no_more_memory_than_docs_security_md_says():
    nbytes = 300_000
    count = nbytes // 3
    bodies = [logprobs(b"\x92\x00\xc0" * count, count)]  # positions without alternatives
    bodies += [logprobs(b"\x93\x00\xc0\xdd" + count.to_bytes(4, "big") + b"\x92\x00\x00" * count, 1)]
    codec = Codec(PeerMessage, LONG_FRAME_BYTES, FRAME_MESSAGES)
    for frame in bodies:
        tracemalloc.start()
        decoded = codec.decode(frame)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(decoded[0], FirstToken)
        assert peak / nbytes * LONG_FRAME_BYTES < 768 << 20


def test_a_frame_has_a_length():
    frame = encode(HONEST)
    assert Codec(PeerMessage, len(frame)).decode(frame) == HONEST
    with pytest.raises(UndeclaredMessage, match="at most"):
        Codec(PeerMessage, len(frame) - 1).decode(frame)
