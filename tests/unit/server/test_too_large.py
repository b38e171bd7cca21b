"""What is too large for a frame, or too much at once, ends in an answer to its clients, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.fake_engine import FakeEngine, with_engine
from support.sim import Sent, SimInstance, make_options
from support.sim_ring import SimRing, SimTokenizer

from pdserve.detokenizer.detokenizer import Detokenizer
from pdserve.detokenizer.process import deliver as deliver_text
from pdserve.detokenizer.process import route as route_text
from pdserve.detokenizer.request_decoder import make_decoder_factory
from pdserve.messages.base import Message
from pdserve.messages.channel import FrameTooLarge, Receiver, Sender, ipc_address
from pdserve.messages.control import Ping, Pong
from pdserve.messages.kv_debug import KVHashes
from pdserve.messages.moves import RunningRequest
from pdserve.messages.outputs import (
    DetokenizeInit,
    FinishType,
    PromptReport,
    ReqError,
    ReqTokens,
    TextBatch,
    TokenBatch,
    TokenLogprob,
)
from pdserve.messages.packed_text import unpack
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.requests import AbortReq, ForkedReq, GenerateReq, StopReq
from pdserve.messages.routes import ToScheduler
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.sessions import SessionState, SnapshotResult
from pdserve.messages.text import Decoded, Encoded
from pdserve.messages.too_large import stand_ins
from pdserve.runtime.web.keys import Caller
from pdserve.server.http.engine.held_bytes import HeldBytes
from pdserve.server.http.engine.plan import Prompt, PromptPlan
from pdserve.server.http.errors import ApiError
from pdserve.server.tokenizer_process import TokenizerOutput, deliver

LIMIT = 2000
LONG = "x" * (LIMIT + 1)


class Limited(Sent):
    """A sending end with a limit, like ``Sender``."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = LIMIT

    @property
    def sent(self) -> list[Message]:
        return list(self.messages)


def generate(rid: str, tokens: int) -> GenerateReq:
    return GenerateReq(rid=rid, input_ids=bytes(4 * tokens), sampling=SamplingParams(seed=1), stop_ids=(), arrival=0.0)


# --- channels ---


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[tuple[Sender, Receiver[Any]]]:
    ctx: zmq.Context[Any] = zmq.Context()
    receiver: Receiver[Any] = Receiver(ctx, ipc_address(tmp_path, "a"), ToScheduler)
    sender = Sender(ctx, ipc_address(tmp_path, "a"), LIMIT)
    yield sender, receiver
    receiver.close()
    sender.close()
    ctx.term()


def test_what_no_frame_can_hold_is_refused_by_its_sender_and_nothing_of_it_is_sent(
    channel: tuple[Sender, Receiver[Any]],
) -> None:
    sender, receiver = channel
    with pytest.raises(FrameTooLarge, match="GenerateReq") as caught:
        sender.send(Ping(id=1), generate("a", LIMIT), generate("b", 1))
    assert [m.rid for m in caught.value.messages if isinstance(m, GenerateReq)] == ["a"]
    sender.send(Ping(id=2))
    assert receiver.recv(10_000) == [Ping(id=2)]


def test_what_only_one_frame_cannot_hold_goes_in_several(channel: tuple[Sender, Receiver[Any]]) -> None:
    sender, receiver = channel
    messages = [generate(str(i), LIMIT // 8) for i in range(5)]
    sender.send(*messages)
    assert [m for _ in range(5) for m in receiver.recv(10_000)] == messages


# --- HTTP ---

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": LONG}),
        ("/generate", {"text": "é" * (LIMIT // 2)}),
        ("/generate", {"input_ids": [70_000] * (LIMIT // 4)}),
        ("/generate", {"text": ["x" * (LIMIT // 8)] * 12}),
        ("/generate", {"text": "x", "sampling_params": {"stop": ["x" * 1000] * 2}}),
        ("/generate", {"text": "x", "rid": "r" * 200, "sampling_params": {"n": 10}}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "n": 64}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * LIMIT}]}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": LONG}]}),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"a": {"b": [LONG]}}}),
        (CHAT, {"messages": [USER] * (LIMIT // 16)}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt_and_all_choices_count(path: str, body: dict[str, Any], stream: bool) -> None:
    async def check(engine: FakeEngine) -> None:
        engine.client._max_request_bytes = LIMIT
        response = await engine.post(path, {"rid": "a", **body, "stream": stream})
        assert response.status_code == 413
        error = response.json()["error"]
        assert error["type"] == "request_too_large"
        assert str(LIMIT) in error["message"]
        assert "send fewer" in error["message"]
        assert (engine.sent, len(engine.client.live), engine.client.held.nbytes) == ([], 0, 0)
        again = await engine.post("/generate", {"text": "x", "rid": "a"})
        assert again.status_code == 200

    with_engine(check)


@pytest.mark.parametrize(
    ("path", "body"), [("/generate", {"text": LONG, "sampling_params": {"n": 3}}), ("/tokenize", {"prompt": LONG})]
)
def test_a_frame_that_http_cannot_send_is_a_413_and_leaves_nothing_behind(path: str, body: dict[str, Any]) -> None:
    async def check(engine: FakeEngine) -> None:
        engine.client._tokenizer = Limited()
        response = await engine.post(path, {"rid": "a", **body} if path == "/generate" else body)
        assert response.status_code == 413
        assert (len(engine.client.live), engine.client.held.nbytes, engine.client.questions._waiting) == (0, 0, {})
        assert not engine.client.live.is_named("a")

    with_engine(check)


def test_prompts_of_running_requests_are_held_up_to_a_limit_until_they_end() -> None:
    async def check(engine: FakeEngine) -> None:
        engine.client.held = HeldBytes(4 * LIMIT)
        body = {"text": "x" * LIMIT, "stream": True}
        async with engine.http() as client:
            running = asyncio.create_task(client.post("/generate", json=body))
            await engine.wait_for(lambda: len(engine.sent) == 1)
            assert LIMIT < engine.client.held.nbytes < 2 * LIMIT
            refused = await engine.post("/generate", body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            small = asyncio.create_task(client.post("/generate", json={"text": "x"}))
            await engine.wait_for(lambda: len(engine.sent) == 2)
            for request in engine.requests:
                engine.step(request, 0)
            assert [(await task).status_code for task in (running, small)] == [200, 200]
        assert engine.client.held.nbytes == 0

    with_engine(check, hold=True)


def plan(rid: str, size: int, n: int = 1) -> list[PromptPlan]:
    prompt = Prompt(text="x" * size)
    return [PromptPlan(prompt, SamplingParams(seed=1), n, rid, True, logprobs=None, bootstrap=None, extra_key="")]


def test_one_key_can_hold_half_of_the_bytes_and_the_others_the_rest() -> None:
    async def check(engine: FakeEngine) -> None:
        engine.client.held = HeldBytes(10 * LIMIT)
        greedy, other = Caller("greedy", is_admin=False), Caller("other", is_admin=False)
        submit = engine.client.submit
        first = [await submit(plan(f"a{i}", LIMIT), streaming=False, caller=greedy) for i in range(4)]
        with pytest.raises(ApiError, match="of which a key may have as many as it leaves free") as refused:
            await submit(plan("a5", LIMIT), streaming=False, caller=greedy)
        assert (refused.value.status, refused.value.code) == (429, "key_limit_exceeded")
        second = await submit(plan("b", 2 * LIMIT), streaming=False, caller=other)
        with pytest.raises(ApiError, match="of this API key"):
            await submit(plan("a6", 1), streaming=False, caller=greedy)
        for submission in (*first, second):
            engine.client.end(submission)
        await engine.wait_for(lambda: not len(engine.client.live))
        assert engine.client.held.nbytes == 0

    with_engine(check, hold=True)


def test_prompts_of_clients_that_hang_up_are_held_until_the_engine_has_ended_them() -> None:
    async def check(engine: FakeEngine) -> None:
        engine.end_aborted = False
        submission = await engine.client.submit(plan("a", LIMIT, n=2), streaming=False)
        held = engine.client.held.nbytes
        assert held > LIMIT
        engine.client.end(submission)
        assert {abort.rid for abort in engine.aborts} == {"a-0", "a-1"}
        for request, left in zip(engine.requests, (held, 0), strict=True):
            assert engine.client.held.nbytes == held
            engine.client.dispatch([TextBatch([engine.text(request, "", [], FinishType.ABORT)])])
            assert engine.client.held.nbytes == left
        assert len(engine.client.live) == 0

    with_engine(check, hold=True)


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600"])
def test_a_long_text_takes_as_many_bytes_on_its_way_as_in_utf8(character: str) -> None:
    async def check(engine: FakeEngine) -> None:
        text = character * 100_000
        await engine.post("/generate", {"text": text})
        await engine.post(CHAT, {"messages": [{"role": "user", "content": text}]})
        plain, chat = engine.sent
        for sent in (plain.text, chat.chat.messages[0].content if chat.chat else None):
            assert sent is not None
            assert unpack(sent) == text
            assert len(sent) == len(text.encode())

    with_engine(check)


def test_a_running_answer_keeps_no_prompt() -> None:
    async def check(engine: FakeEngine) -> None:
        async with engine.http() as client:
            running = asyncio.create_task(client.post("/generate", json={"text": LONG, "stream": True}))
            await engine.wait_for(lambda: len(engine.sent) == 1)
            [request] = engine.sent
            engine.requests.clear()
            text, request.text = request.text, None
            await asyncio.sleep(0)
            assert sys.getrefcount(text) == 2, "this variable, and the argument"
            engine.step(request, 0)
            await running

    with_engine(check, hold=True)


# --- tokenizer, scheduler, detokenizer ---


def test_the_tokenizer_ends_each_answer_of_what_it_cannot_pass_on_and_passes_on_the_rest() -> None:
    scheduler, http = Limited(), Limited()
    forked = ForkedReq(generate("a", LIMIT), ["b", "c"])
    deliver(
        TokenizerOutput([Ping(id=1), forked, AbortReq("b"), generate("d", 1)], [Encoded([[1] * 3000], id=7)], []),
        scheduler,
        http,
    )
    assert scheduler.sent == [Ping(id=1), AbortReq("b"), generate("d", 1)]
    encoded, *errors = http.sent
    assert isinstance(encoded, Encoded)
    assert "limit of 2000" in str(encoded.error)
    assert [(e.rid, e.status) for e in errors if isinstance(e, ReqError)] == [("a", 413), ("b", 413), ("c", 413)]


def long_report() -> PromptReport:
    return PromptReport(b"", [TokenLogprob(1, -1.0, [(1, -1.0)] * 20)] * 20)


def test_the_scheduler_ends_what_it_cannot_tell_and_tells_the_rest() -> None:
    sim = SimInstance(make_options())
    limited = Limited()
    sim.outbox._detokenizer = limited
    for rid in "abc":
        sim.submit(rid, range(10), max_new_tokens=4, stream=True)
    sim.scheduler.reqs["b"].input_logprobs = [TokenLogprob(1, -1.0, [(1, -1.0)] * 20)] * 20
    sim.outbox.answer(Pong(True, id=1))
    for req in sim.scheduler.reqs.values():
        req.pending_output = [1]
        sim.outbox.tokens(req, None, None)
    assert sim.outbox.flush() == ["b"]
    sent_items = [[item.rid for item in m.items] if isinstance(m, TokenBatch) else m for m in limited.sent]
    pong, first, error, last = sent_items
    assert (pong, first, last) == (Pong(True, id=1), ["a"], ["c"])
    assert isinstance(error, ReqError)
    assert (error.rid, error.status) == ("b", 413)


def test_the_detokenizer_ends_what_it_cannot_tell_and_has_the_scheduler_stop_it() -> None:
    detokenizer = Detokenizer(make_decoder_factory(SimTokenizer()))
    init = DetokenizeInit((), True, b"")
    long = TokenBatch([ReqTokens("a", [1], init=init, prompt=long_report())])
    short = TokenBatch([ReqTokens("b", [1], init=init)])
    scheduler, http = Limited(), Limited()
    deliver_text(detokenizer, route_text(detokenizer, [long, short]), scheduler, http)
    error, text = http.sent
    assert isinstance(error, ReqError)
    assert isinstance(text, TextBatch)
    assert (error.rid, error.status, text.items[0].rid) == ("a", 413, "b")
    assert (scheduler.sent, len(detokenizer)) == ([StopReq("a")], 1)


def test_questions_whose_answers_are_too_large_are_answered() -> None:
    error = FrameTooLarge([], 3000, LIMIT)
    snapshot, hashes = (
        SnapshotResult(SessionState(RunningRequest(generate("a", 1), b"", 1, 0.0), "f", bytes(16)), id=5),
        KVHashes(0, 4, "", "tokens", [], id=5),
    )
    for answer, kind in (
        (Encoded(id=5), Encoded),
        (Decoded(id=5), Decoded),
        (snapshot, RefusedAnswer),
        (hashes, RefusedAnswer),
    ):
        [said] = stand_ins(answer, error)
        assert (type(said), said.id) == (kind, 5)
        assert "3000 bytes" in str(getattr(said, "error", None) or said.text)
        assert getattr(said, "status", 413) == 413


# --- all of them ---

SCORED = {"return_logprob": True, "top_logprobs_num": 4}
TOO_MUCH = {
    "tokenizer": {"text": "x" * 450},
    "scheduler": {"text": "x" * 450},
    "detokenizer": {"text": "x" * 60, **SCORED, "logprob_start_len": 0},
    "http": {"text": "x" * 60, **SCORED, "logprob_start_len": 0},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hop", TOO_MUCH)
def test_wherever_a_frame_is_too_large_its_requests_end_and_the_next_is_served(hop: str, stream: bool) -> None:
    ring = SimRing()
    ring.limits[hop].limit = 800
    sampling = {"max_new_tokens": 3, "n": 3}
    small = {"text": "hello", "sampling_params": {"max_new_tokens": 3}}
    large, beside = ring.post({**TOO_MUCH[hop], "sampling_params": sampling, "stream": stream}, small)
    assert large.status_code == 413
    assert "send fewer" in large.json()["error"]["message"]
    assert beside.status_code == 200
    # The first choice's error is the answer; by the end of the next request the other choices have ended, too.
    [after] = ring.post(small)
    assert after.json()["output_ids"] == beside.json()["output_ids"]
    assert (len(ring.client.live), ring.client.held.nbytes) == (0, 0)
    assert (dict(ring.scheduler.reqs), len(ring.detokenizer)) == ({}, 0)
