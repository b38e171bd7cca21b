"""Several answers to one prompt: it is sent, tokenized and passed on once, and each answer is a request of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.rendering import rendered
from support.sim import VOCAB
from support.sim_ring import CONTEXT, SimRing, SimTokenizer

from pdserve.messages.base import unpack_i32
from pdserve.messages.channel import encode
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.outputs import ReqError
from pdserve.messages.requests import (
    AbortReq,
    Bootstrap,
    ForkedReq,
    GenerateReq,
    LogprobOptions,
    TokenizeReq,
)
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import ForwardStep, StepResult
from pdserve.model_files.model_limits import ModelLimits
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.server.request_tokenizer import RequestTokenizer
from pdserve.server.tokenizer_process import route

MANY = 64
TEXT = "x" * 100_000


class Counting(SimTokenizer):
    """Counts the characters that it has encoded."""

    encoded = 0

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.encoded += sum(map(len, texts))
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


def make_req(**fields: Any) -> TokenizeReq:
    return TokenizeReq(rid="a-0", sampling=SamplingParams(seed=2**63 - 2), arrival=1.0, **fields)


def make_tokenizer() -> tuple[RequestTokenizer, Counting]:
    counting = Counting()
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", {})
    return RequestTokenizer(counting, template, ModelLimits(CONTEXT, VOCAB)), counting


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": [40_000] * 30_000}),
    ],
    ids=["chat", "text", "ids"],
)
def test_http_sends_a_prompt_once_whatever_n_is(path: str, prompt: dict[str, Any]) -> None:
    async def check(engine: FakeEngine) -> httpx.Response:
        body = {**prompt, "n": MANY, "max_tokens": 1, "rid": "a"}
        response = await engine.post(path, body)
        [request] = engine.sent
        assert request.rids == [f"a-{i}" for i in range(MANY)]
        assert len(encode([request])) < len(orjson.dumps(body)) + 100 * MANY
        return response

    assert len(with_engine(check).json()["choices"]) == MANY


@pytest.mark.parametrize("prompt", [{"text": "x" * 400}, {"chat": Conversation([ChatMessage("user", "x" * 400)])}])
def test_a_prompt_is_rendered_and_encoded_once_and_passed_on_once(prompt: dict[str, Any]) -> None:
    tokenizer, counting = make_tokenizer()
    request = make_req(forks=["a-1", "a-2"], **prompt)
    [forked] = route(tokenizer, [request], rendered(tokenizer, [request])).to_scheduler
    assert isinstance(forked, ForkedReq)
    assert counting.encoded == 400
    first, *others = forked.requests()
    assert len(unpack_i32(first.input_ids)) == 400
    assert all(request.input_ids is first.input_ids for request in others)


def test_answers_differ_in_name_seed_room_and_place_and_name_the_first() -> None:
    tokenizer, _ = make_tokenizer()
    bootstrap = Bootstrap("h", 1, 2**63 - 1)
    [forked] = route(tokenizer, [make_req(text="x", forks=["b", "c"], bootstrap=bootstrap, place=5)]).to_scheduler
    assert isinstance(forked, ForkedReq)
    requests = list(forked.requests())
    assert [(r.rid, r.fork_of, r.place) for r in requests] == [("a-0", "", 5), ("b", "a-0", 6), ("c", "a-0", 7)]
    assert [r.sampling.seed for r in requests] == [2**63 - 2, 2**63 - 1, 0]
    assert [r.bootstrap.room for r in requests if r.bootstrap] == [2**63 - 1, 0, 1]


def test_one_answer_is_asked_for_as_ever() -> None:
    tokenizer, _ = make_tokenizer()
    [request] = route(tokenizer, [make_req(text="x")]).to_scheduler
    assert isinstance(request, GenerateReq)


def test_an_error_of_the_prompt_reaches_each_answer_and_no_other_request() -> None:
    tokenizer, _ = make_tokenizer()
    good = TokenizeReq(rid="good", sampling=SamplingParams(seed=1), arrival=1.0, text="x")
    routed = route(tokenizer, [make_req(input_ids=[VOCAB], forks=["b", "c"]), AbortReq("b"), good])
    assert [m.rid for m in routed.to_http if isinstance(m, ReqError) and m.status == 400] == ["a-0", "b", "c"]
    assert [m.rid for m in routed.to_scheduler if isinstance(m, AbortReq | GenerateReq)] == ["b", "good"]


def test_answers_are_those_of_the_same_requests_sent_one_by_one() -> None:
    body = {"text": "hello", "rid": "a", "sampling_params": {"max_new_tokens": 5, "n": 3, "sampling_seed": 7}}
    [together] = SimRing().post(body)
    apart = []
    for i in range(3):
        sampling = {"max_new_tokens": 5, "sampling_seed": 7 + i}
        [answer] = SimRing().post({"text": "hello", "rid": f"a-{i}", "sampling_params": sampling})
        apart.append(answer.json()["output_ids"])
    assert [answer["output_ids"] for answer in together.json()] == apart


def test_one_answer_can_be_aborted_before_and_after_the_prompt_is_tokenized() -> None:
    ring = SimRing()
    request = make_req(text="hello", forks=["a-1", "a-2"])
    ring.send(request, AbortReq("a-1"))
    assert sorted(ring.scheduler.reqs) == ["a-0", "a-2"]
    ring.send(AbortReq("a-0"))
    assert sorted(ring.scheduler.reqs) == ["a-2"]


class Scoring(SimRing):
    """Notes how many prompt tokens each step scores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scored: list[int] = []
        run = self.worker.run

        def noting(step: ForwardStep) -> StepResult:
            self.scored += [len(spec.targets) // 4 for spec in step.input_logprobs]
            return run(step)

        self.worker.run = noting  # type: ignore[method-assign]


@pytest.mark.parametrize("start", [0, 1, 9])
@pytest.mark.parametrize("options", [{}, {"disable_radix_cache": True}], ids=["cached", "not cached"])
def test_the_logprobs_of_a_prompt_are_computed_once(start: int, options: dict[str, Any]) -> None:
    text = "hello" * 30
    fields = {"text": text, "return_logprob": True, "logprob_start_len": start, "rid": "a"}
    ring = Scoring(**options)
    [together] = ring.post({**fields, "sampling_params": {"max_new_tokens": 3, "n": 4, "sampling_seed": 7}})
    assert sum(ring.scored) == len(text) - max(start, 1)
    for i, answer in enumerate(together.json()):
        [apart] = SimRing().post({**fields, "sampling_params": {"max_new_tokens": 3, "sampling_seed": 7 + i}})
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert answer["meta_info"][name] == apart.json()["meta_info"][name]
        assert len(answer["meta_info"]["input_token_logprobs"]) == len(text) - start


def test_a_fork_whose_first_is_gone_scores_the_prompt_itself() -> None:
    ring = Scoring()
    fields: dict[str, Any] = {"text": "hello" * 30, "logprobs": LogprobOptions(0, 0), "forks": ["a-1", "a-2"]}

    async def run() -> None:
        ring.send(make_req(**fields), AbortReq("a-0"))
        while not all(ring.scheduler.reqs[rid].output_len for rid in ("a-1", "a-2")):
            ring.plan()
            ring.work()

    asyncio.run(run())
    assert sum(ring.scored) == 149
    for rid in ("a-1", "a-2"):
        assert len(ring.scheduler.reqs[rid].input_logprobs or ()) == 150


def test_what_was_scored_before_a_retraction_is_not_scored_again() -> None:
    ring = Scoring(chunked_prefill_size=32)
    ring.send(make_req(text="hello" * 30, logprobs=LogprobOptions(0, 0)))
    ring.plan()
    ring.work()
    req = ring.scheduler.reqs["a-0"]
    assert (req.computed < 150, sum(ring.scored) > 0) == (True, True)
    ring.scheduler.planner.retraction.retract(req, ring.now)
    while req.output_len == 0:
        ring.plan()
        ring.work()
    assert sum(ring.scored) == 149
    assert [entry.token_id for entry in req.input_logprobs or ()] == req.token_ids[:150].tolist()
