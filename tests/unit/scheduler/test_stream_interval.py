"""``--stream-interval``: fewer messages, the same answers. On the scheduler alone, and through HTTP."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.fake_engine import events
from support.sim import SimInstance, logprob_of, make_options, reference_output
from support.sim_pair import SimPair
from support.sim_ring import PIECES, SimRing

from pdserve.messages.base import pack_i32
from pdserve.messages.outputs import FinishType, ReqError, ReqTokens
from pdserve.messages.requests import AbortReq, StopReq
from pdserve.messages.worker import StepResult
from pdserve.scheduler.outbox import QUIET_INTERVAL

INTERVALS = [1, 3, 32]
PROMPT = [3, 1, 4, 1, 5]


def text_of(token_ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")


def sizes(sim: SimInstance, rid: str) -> list[int]:
    """Return how many tokens each message brought."""
    return [len(item.token_ids) for item in sim.items[rid]]


def expected_sizes(tokens: int, interval: int) -> list[int]:
    """Return the expected sizes: one at once, then ``interval`` at a time, and the rest with the end."""
    whole, rest = divmod(tokens - 1, interval)
    return [1] + [interval] * whole + ([rest] if rest else [])


def run(interval: int, **request: Any) -> SimInstance:
    sim = SimInstance(make_options(stream_interval=interval))
    sim.submit("a", PROMPT, **request)
    sim.run_until_idle()
    return sim


# --- the scheduler ---


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 40])
def test_a_stream_gets_its_first_token_at_once_and_its_end_at_once(interval: int, tokens: int) -> None:
    sim = run(interval, max_new_tokens=tokens)
    assert sizes(sim, "a") == expected_sizes(tokens, interval)
    assert sim.tokens["a"] == reference_output(PROMPT, tokens)
    first, last = sim.items["a"][0], sim.items["a"][-1]
    assert (first.meta.prompt_tokens, last.finish.type) == (len(PROMPT), FinishType.LENGTH)
    assert last.meta.completion_tokens == tokens
    assert sum(item.init is not None for item in sim.items["a"]) == 1


@pytest.mark.parametrize("interval", INTERVALS)
def test_without_a_stream_tokens_come_in_large_batches_whatever_the_interval(interval: int) -> None:
    sim = run(interval, max_new_tokens=70, stream=False)
    assert sizes(sim, "a") == [QUIET_INTERVAL, QUIET_INTERVAL, 6]
    assert sim.tokens["a"] == reference_output(PROMPT, 70)
    assert sim.items["a"][0].init is not None


@pytest.mark.parametrize(("interval", "stream", "expected"), [(1, True, 1), (3, True, 3), (1, False, 1), (3, False, 1)])
def test_stop_strings_are_looked_for_after_each_token_unless_the_stream_asks_for_fewer(
    interval: int, stream: bool, expected: int
) -> None:
    sim = run(interval, max_new_tokens=9, stream=stream, stop=("never",))
    assert sizes(sim, "a") == expected_sizes(9, expected)
    # The detokenizer may find a stop string in any of them, and answers with the meta that came with it.
    assert [i.meta.completion_tokens for i in sim.items["a"]] == list(itertools.accumulate(sizes(sim, "a")))


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_token_comes_with_all_that_was_held(interval: int, stream: bool) -> None:
    expected = reference_output(PROMPT, 20)
    stop = expected[6]
    expected = expected[: expected.index(stop) + 1]
    sim = run(interval, max_new_tokens=20, stop_ids=[stop], stream=stream)
    assert sim.tokens["a"] == expected
    assert sim.ends["a"].finish.matched == stop
    assert sim.ends["a"].meta.completion_tokens == len(expected)


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_travel_with_their_tokens(interval: int, stream: bool) -> None:
    sim = SimInstance(make_options(stream_interval=interval))
    sim.submit("a", PROMPT, max_new_tokens=40, logprobs=(-1, 0), stream=stream)
    sim.submit("b", PROMPT[1:], max_new_tokens=40, stream=stream)
    sim.run_until_idle()
    for item in sim.items["a"]:
        assert item.logprobs == [logprob_of(token) for token in item.token_ids]
    assert {item.logprobs for item in sim.items["b"]} == {None}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("turns", range(1, 9))
def test_an_abort_brings_all_that_was_computed(stream: bool, turns: int) -> None:
    tokens_by_interval = {}
    for interval in (1, 32):
        sim = SimInstance(make_options(stream_interval=interval))
        sim.submit("a", PROMPT, max_new_tokens=50, stream=stream, logprobs=(-1, 0))
        for _ in range(turns):
            sim.plan()
            sim.work()
        sim.scheduler.abort(AbortReq("a"))
        sim.run_until_idle()
        tokens_by_interval[interval] = sim.tokens["a"]
        end = sim.ends["a"]
        assert isinstance(end, ReqTokens)
        assert end.finish.type is FinishType.ABORT
        assert end.meta.completion_tokens == len(tokens_by_interval[interval])
        assert end.meta.timing.decode_ms == pytest.approx(1.0 * (turns - 1))  # a turn of the simulation takes 1 ms
        assert sum(len(item.logprobs or ()) for item in sim.items["a"]) == len(tokens_by_interval[interval])
    assert tokens_by_interval[1] == tokens_by_interval[32] == reference_output(PROMPT, turns)


def test_a_request_that_fails_has_sent_what_it_had() -> None:
    sim = SimInstance(make_options(stream_interval=32, disable_overlap_schedule=True))
    sim.submit("a", PROMPT, max_new_tokens=50)
    for _ in range(4):
        sim.plan()
        sim.work()
    sim.plan()
    step = sim.to_worker.messages.popleft()
    sim.scheduler.on_step_result(StepResult(step.step_id, pack_i32([0]), 0.1, bad_entries=[0]), sim.now)
    sim.outbox.flush()
    sim.plan()
    assert isinstance(sim.ends["a"], ReqError)
    assert sim.tokens["a"] == reference_output(PROMPT, 4)


def test_what_a_stop_string_cut_off_is_not_sent() -> None:
    sim = SimInstance(make_options(stream_interval=32))
    sim.submit("a", PROMPT, max_new_tokens=50, stop=("x",))
    for _ in range(4):
        sim.plan()
        sim.work()
    sim.scheduler.stop(StopReq("a"))
    sim.run_until_idle()
    assert sizes(sim, "a") == [1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_retracted_request_tells_what_it_has_before_it_waits(stream: bool) -> None:
    sim = SimInstance(make_options(max_total_tokens=64, schedule_conservativeness=0.01, stream_interval=32))
    prompts = {f"r{i}": [i, i + 1, i + 2, 7] for i in range(6)}
    for rid, prompt in prompts.items():
        sim.submit(rid, prompt, max_new_tokens=30, stream=stream)
    waited = 0
    while not sim.scheduler.is_idle:
        sim.plan()
        for req in sim.scheduler.planner.waiting.values():
            waited += bool(req.retractions)
            assert not req.pending_output
        sim.work()
    assert waited
    for rid, prompt in prompts.items():
        assert sim.tokens[rid] == reference_output(prompt, 30)
        assert sim.ends[rid].meta.completion_tokens == 30


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("stream", [True, False])
def test_the_token_of_a_hand_over_is_a_streams_first(interval: int, stream: bool) -> None:
    pair = SimPair(stream_interval=interval)
    pair.submit("a", range(30), 7, max_new_tokens=40, stream=stream)
    while not pair.is_idle:
        for move in pair.moves():
            move()
    tokens = reference_output(range(30), 40)
    assert pair.decode.tokens["a"] == tokens
    assert pair.prefill.tokens["a"] == tokens[:1]
    assert pair.prefill.ends["a"].meta.completion_tokens == 1
    assert sizes(pair.decode, "a") == (expected_sizes(40, interval) if stream else [QUIET_INTERVAL, 8])


# --- through HTTP ---


def body(tokens: int, stream: bool = True, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, **more.pop("sampling", {})}
    return {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream, **more}


def answers(interval: int, *bodies: dict[str, Any], path: str = "/generate") -> list[Any]:
    """Return the events of each stream."""
    return [events(response) for response in SimRing(stream_interval=interval).post(*bodies, path=path)]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs have in common."""
    meta = {k: v for k, v in answer["meta_info"].items() if k not in ("id", "e2e_latency", "timing")}
    return {**answer, "meta_info": meta}


@pytest.mark.parametrize("interval", INTERVALS)
def test_a_client_sees_the_interval_and_the_whole_answer(interval: int) -> None:
    tokens = reference_output(PROMPT, 40)
    [stream] = answers(interval, body(40, return_logprob=True))
    counts = list(itertools.accumulate(expected_sizes(40, interval)))
    assert [e["meta_info"]["completion_tokens"] for e in stream] == counts
    for event, count in zip(stream, counts, strict=True):
        assert event["output_ids"] == tokens[:count]
        assert event["meta_info"]["prompt_tokens"] == len(PROMPT)
        logprobs = [[-t / 8, t, None] for t in tokens[:count]]
        assert event["meta_info"]["output_token_logprobs"] == logprobs
    assert stream[-1]["text"] == text_of(tokens).rstrip("\N{REPLACEMENT CHARACTER}")
    assert stream[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}


def test_openai_chunks_join_to_the_same_text() -> None:
    request = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
    request["stream_options"] = {"include_usage": True}
    joined = set()
    for interval in INTERVALS:
        [stream] = answers(interval, request, path="/v1/completions")
        joined.add("".join(choice["text"] for event in stream for choice in event["choices"]))
        assert stream[-1]["usage"]["completion_tokens"] == 40
    assert joined == {text_of(reference_output(PROMPT, 40)).rstrip("\N{REPLACEMENT CHARACTER}")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("start", range(1, 9))
def test_a_stop_string_cuts_the_answer_at_the_same_token(interval: int, start: int) -> None:
    stop = text_of(reference_output(PROMPT, 40)[start : start + 3])
    request = body(40, sampling={"stop": stop}, return_logprob=True)
    [reference] = answers(1, request)
    [stream] = answers(interval, request)
    assert without_times(stream[-1]) == without_times(reference[-1])
    assert stream[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in stream[-1]["text"]
    assert stream[-1]["meta_info"]["completion_tokens"] == start + 3


@pytest.mark.parametrize("more", [{}, {"return_logprob": True}, {"sampling": {"stop": "never"}}])
def test_a_plain_answer_is_the_streams_last_event(more: dict[str, Any]) -> None:
    [reference] = answers(1, body(40, **more))
    for interval in INTERVALS:
        [response] = SimRing(stream_interval=interval).post(body(40, stream=False, **more))
        assert without_times(response.json()) == without_times(reference[-1])


@pytest.mark.parametrize(
    ("interval", "stream", "messages"), [(1, True, 40), (3, True, 14), (32, True, 3), (1, False, 2), (32, False, 2)]
)
def test_messages_are_saved_on_the_whole_way(interval: int, stream: bool, messages: int) -> None:
    ring = SimRing(stream_interval=interval)
    ring.post(body(40, stream=stream))
    assert ring.texts == messages


def test_many_streams_at_once_are_each_whole() -> None:
    bodies = [{**body(20 + i, stream=i % 2 == 0), "input_ids": [i, i + 1, 7]} for i in range(8)]
    for interval in INTERVALS:
        ring = SimRing(stream_interval=interval, max_total_tokens=96, schedule_conservativeness=0.01)
        for i, response in enumerate(ring.post(*bodies)):
            last = events(response)[-1] if i % 2 == 0 else response.json()
            assert last["output_ids"] == reference_output([i, i + 1, 7], 20 + i)
        assert ring.scheduler.planner.retraction.count
        assert len(ring.detokenizer) == len(ring.client.live) == 0


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_through_http_answers_with_all_that_was_computed(interval: int, stream: bool) -> None:
    ring = SimRing(stream_interval=interval)
    watch = ring.scheduler.on_step_result

    def abort_after_ten(result: StepResult, now: float) -> None:
        watch(result, now)
        if ring.scheduler.counters.steps == 10:
            ring.client.abort_all()

    ring.scheduler.on_step_result = abort_after_ten  # type: ignore[method-assign]
    [response] = ring.post(body(40, stream))
    last = events(response)[-1] if stream else response.json()
    assert last["output_ids"] == reference_output(PROMPT, 10)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == 10
