"""Bounds of what one request costs an instance: log-probabilities, turns of the event loop, work of the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.sim import VOCAB, SimInstance, make_options
from support.sim_ring import CONTEXT, SimTokenizer

from pdserve.messages.outputs import ReqError, TokenBatch
from pdserve.messages.requests import Bootstrap, GenerateReq, LogprobOptions, TokenizeReq
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.text import Encoded, EncodeReq
from pdserve.model_files.model_limits import ModelLimits
from pdserve.model_files.text.byte_table import ByteTable
from pdserve.runtime.web.aside import Aside
from pdserve.scheduler.options import DEFAULT_MAX_LOGPROBS
from pdserve.server.http.bodies import large_bodies
from pdserve.server.http.bodies.large_bodies import MAX_TEXT_PARTS, MAX_TOKEN_IDS, parse_in_pieces
from pdserve.server.http.bodies.tool_fields import MAX_TOOL_CALLS
from pdserve.server.http.engine import request_batch
from pdserve.server.http.engine.plan import Prompt, PromptPlan
from pdserve.server.http.engine.repeated import MAX_REPEATED
from pdserve.server.http.engine.request_batch import SLICE_CHOICES
from pdserve.server.http.errors import ApiError
from pdserve.server.http.generation import engine_response
from pdserve.server.http.llama.schemas import LlamaBody
from pdserve.server.http.llama.writer import settings
from pdserve.server.http.parsing import parse_json
from pdserve.server.prompt_encoder import MissingTemplate
from pdserve.server.request_tokenizer import RequestTokenizer

UNSET = 2**31 - 1
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c"}


# --- log-probabilities ---


def tokenized(
    limit: int, logprobs: LogprobOptions | None, prompt: int = 100, n: int = 1, max_new_tokens: int = 10
) -> GenerateReq | ReqError:
    tokenizer = RequestTokenizer(SimTokenizer(), MissingTemplate(), ModelLimits(CONTEXT, VOCAB), limit)
    sampling = SamplingParams(seed=1, max_new_tokens=max_new_tokens)
    forks = [f"a-{i}" for i in range(1, n)]
    [answer] = tokenizer.tokenize(
        [TokenizeReq(rid="a", sampling=sampling, arrival=0.0, text="x" * prompt, logprobs=logprobs, forks=forks)]
    )
    return answer


@pytest.mark.parametrize(
    ("logprobs", "n", "entries"),
    [
        (LogprobOptions(0, 4), 1, (100 + 10) * 5),
        (LogprobOptions(60, 0), 1, (40 + 10) * 1),
        (LogprobOptions(-1, 4), 1, 10 * 5),
        (LogprobOptions(0, 4), 3, 3 * (100 + 10) * 5),
    ],
)
def test_log_probabilities_of_prompt_and_output_and_of_all_answers_count(
    logprobs: LogprobOptions, n: int, entries: int
) -> None:
    assert isinstance(tokenized(entries, logprobs, n=n), GenerateReq)
    refused = tokenized(entries - 1, logprobs, n=n)
    assert isinstance(refused, ReqError)
    assert (refused.status, refused.field) == (400, "logprobs")
    assert f"are {entries}, the limit is {entries - 1}" in refused.message
    assert isinstance(tokenized(1, None), GenerateReq)


def test_the_default_limit_is_of_262144_and_the_refusal_names_the_option() -> None:
    logprobs = LogprobOptions(0, 127)
    assert isinstance(tokenized(DEFAULT_MAX_LOGPROBS, logprobs, prompt=256, n=4, max_new_tokens=256), GenerateReq)
    refused = tokenized(DEFAULT_MAX_LOGPROBS, logprobs, prompt=256, n=5, max_new_tokens=256)
    assert isinstance(refused, ReqError)
    assert "are 327680, the limit is 262144 (--max-logprobs-per-request)" in refused.message
    assert "raise the option" in refused.message


def test_a_request_without_a_limit_of_tokens_gets_as_many_as_fit() -> None:
    answer = tokenized(3 * 5 * 150, LogprobOptions(0, 4), n=3, max_new_tokens=UNSET)
    assert isinstance(answer, GenerateReq)
    assert answer.sampling.max_new_tokens == 50
    refused = tokenized(3 * 5 * 100, LogprobOptions(0, 4), n=3, max_new_tokens=UNSET)
    assert isinstance(refused, ReqError)
    assert "1 output token" in refused.message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "x", "return_logprob": True}, "top_logprobs_num"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "top_logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs"),
    ],
)
def test_the_refusal_names_the_field_of_its_api(path: str, body: dict[str, Any], param: str) -> None:
    async def check(engine: FakeEngine) -> httpx.Response:
        engine.errors = [ReqError("", 400, "too many", field="logprobs")]
        return await engine.post(path, body)

    assert with_engine(check).json()["error"]["param"] == param


def test_a_batch_that_comes_to_more_ends_and_nothing_of_it_is_left() -> None:
    async def check(engine: FakeEngine) -> None:
        body = {"text": ["x"] * 4, "return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0}
        response = await engine.post("/generate", {**body, "sampling_params": {"max_new_tokens": 3}})
        assert response.status_code == 413
        said = response.json()["error"]["message"]
        assert re.search(r"come to 4\d log-probabilities, the limit is 40 \(--max-logprobs-per-request\)", said), said
        await engine.wait_for(lambda: len(engine.client.live) == 0)
        one = {**body, "text": "x", "sampling_params": {"max_new_tokens": 3}}
        assert (await engine.post("/generate", one)).status_code == 200

    with_engine(check, max_logprobs_per_request=40)


@pytest.mark.parametrize(("leg", "has_prompt"), [("prefill", False), ("decode", True), ("", True)])
def test_what_a_router_drops_of_a_prefill_is_not_made(leg: Any, has_prompt: bool) -> None:
    sim = SimInstance(make_options())
    sim.submit("a", range(10), max_new_tokens=4, stream=True, logprobs=(0, 0))
    req = sim.scheduler.reqs["a"]
    req.msg.bootstrap = Bootstrap("h", 1, 2, leg=leg)
    sim.outbox.tokens(req, None, None)
    [batch] = [m for m in sim.outbox._to_detokenizer if isinstance(m, TokenBatch)]
    assert (batch.items[0].prompt is not None) is has_prompt


# --- the event loop ---


def test_the_biases_of_a_batch_are_listed_once() -> None:
    """4,096 lists of 1,024 biases would hold up the event loop for seconds."""
    body = LlamaBody(prompt=["a", "b"], logit_bias={"5": 1.0})
    samplings = [SamplingParams(seed=seed, logit_bias={5: 1.0}) for seed in (3, 4)]
    plans = [PromptPlan(Prompt(text="a"), sampling, 1, "r", True, None, None, "") for sampling in samplings]
    first, second = settings(body, plans, "m", 512)
    assert (first["seed"], second["seed"], first["logit_bias"]) == (3, 4, [[5, 1.0]])
    assert first["logit_bias"] is second["logit_bias"]


def test_a_batch_of_thousands_is_made_ready_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = []

    async def check(engine: FakeEngine) -> None:
        async def count(seconds: float) -> None:
            slices.append(seconds)

        monkeypatch.setattr(request_batch.asyncio, "sleep", count)
        asking = engine.post("/generate", {"text": ["x"] * 1000, "sampling_params": {"n": 2, "max_new_tokens": 1}})
        response = await asking
        monkeypatch.undo()
        assert len(response.json()) == 2000
        assert len(engine.sent) == 1000

    with_engine(check)
    assert len(slices) >= 2000 // SLICE_CHOICES - 1


@pytest.mark.parametrize(
    ("body", "aside"),
    [
        ({"text": "x"}, [False, False]),
        ({"text": "x" * large_bodies.LARGE_BYTES}, [True, False]),
        ({"text": ["x"] * (large_bodies.LARGE_BATCH + 1)}, [False, True]),
    ],
)
def test_large_bodies_are_parsed_and_large_batches_planned_aside(
    body: dict[str, Any], aside: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    run = Aside.run

    async def record(self: Aside, is_large: bool, work: Any) -> Any:
        asked.append(is_large)
        return await run(self, is_large, work)

    monkeypatch.setattr(Aside, "run", record)
    body = {**body, "sampling_params": {"max_new_tokens": 1}}
    assert with_engine(lambda engine: engine.post("/generate", body)).status_code == 200
    assert asked == [*aside, False]


def test_a_whole_answer_with_many_log_probabilities_is_written_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_response, "LARGE_LOGPROBS", 40)
    asked: list[bool] = []
    run = Aside.run

    async def record(self: Aside, is_large: bool, work: Any) -> Any:
        asked.append(is_large)
        return await run(self, is_large, work)

    monkeypatch.setattr(Aside, "run", record)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "logprobs": True}
    for top, aside in ((0, False), (4, True)):
        asked.clear()
        response = with_engine(
            lambda engine, top=top: engine.post("/v1/chat/completions", {**chat, "top_logprobs": top})
        )
        assert len(response.json()["choices"][0]["logprobs"]["content"]) == 9
        assert asked == [False, aside]


VALUES = [
    {"a": 1},
    {"text": 'é😀\n"', "b": [1, 2], "c": None},
    {"input_ids": [[1, 2], [3]], "x": {"y": [[]]}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
]


@pytest.mark.parametrize("content", VALUES)
@pytest.mark.parametrize("piece", [0, 1 << 18])
def test_pieces_give_what_the_whole_gives(content: Any, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "PIECE_BYTES", piece)
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    assert parse_in_pieces(data) == content
    assert parse_in_pieces(data.replace(b"\n", b"\n" * 40)) == content


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[1",
        b'{"a": NaN}',
        b'{"a": [[1], [NaN]]}',
        b'{"a": [[1],]}',
        b'{"a": "\\ud800"}',
        b"{}x",
        b"\xff",
        b'{"\xff": 1}',
        b'{"a": {"\xff": 1}}',
        b'{"a": "\xff"}',
        b'{"\xed\xa0\x80": 1}',
        b"1 2",
    ],
)
def test_what_is_wrong_is_reported_as_of_the_whole(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "PIECE_BYTES", 0)
    with pytest.raises(orjson.JSONDecodeError) as expected:
        orjson.loads(data)
    with pytest.raises(orjson.JSONDecodeError) as said:
        parse_in_pieces(data)
    assert str(said.value) == str(expected.value)


def test_lists_of_lists_are_parsed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "PIECE_BYTES", 0)
    sizes: list[int] = []
    loads = orjson.loads

    def record(data: Any) -> Any:
        sizes.append(len(data))
        return loads(data)

    monkeypatch.setattr(large_bodies.orjson, "loads", record)
    data = orjson.dumps({"input_ids": [list(range(100))] * 50})
    assert len(parse_json(data, is_large=True)["input_ids"]) == 50
    assert max(sizes) < len(data) // 40


TEXT = 1 << 20
EMOJI, HAN = "😀", "漢"


@pytest.mark.parametrize(
    ("fields", "takes"),
    [
        ({"text": "a" * (TEXT - 100)}, True),
        ({"text": "a" * (TEXT // 4 - 100) + EMOJI}, True),
        ({"text": "a" * (TEXT // 4 + 100) + EMOJI}, False),
        ({"text": "a" * (TEXT // 2 + 100) + HAN}, False),
        ({"text": HAN * (TEXT // 3 - 100)}, True),  # two bytes each
        ({"text": "é" * (TEXT // 2 - 100)}, True),  # one byte each
        ({"text": EMOJI * (TEXT // 4 - 100)}, True),
        ({"text": ["a" * (TEXT // 8), EMOJI, "a" * (TEXT // 2)]}, True),
        ({"text": ["a" * (TEXT // 8) + EMOJI, "a" * (TEXT // 8) + EMOJI, "a" * (TEXT // 8)]}, False),
        ({"text": "a" * (TEXT // 4), "messages": [{"content": "a" * (TEXT // 4) + EMOJI}]}, False),
        ({"text": "\\u" * (TEXT // 4 + 100) + HAN}, False),  # backslashes before a letter
        ({"text": ["a" * (TEXT // 2), EMOJI], "x": [{}] * (large_bodies.MAX_PIECES + 1)}, True),
        ({"text": ["{" * (TEXT // 2), EMOJI]}, True),
        ({"text": ["{" * (TEXT // 4 + 100) + EMOJI]}, False),
    ],
)
def test_the_memory_of_a_bodys_texts_is_limited(
    fields: dict[str, Any], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "MAX_TEXT_BYTES", TEXT)
    data = orjson.dumps(fields)
    if takes:
        assert parse_in_pieces(data) == fields
        return
    for body in (data, json.dumps(fields).encode()):
        with pytest.raises(ApiError, match="1 MiB in memory") as refused:
            parse_in_pieces(body)
        assert refused.value.status == 413


@pytest.mark.parametrize("text", [HAN * (TEXT // 2 - 100), "\\" + HAN * (TEXT // 2 - 100), EMOJI * (TEXT // 8 - 100)])
def test_an_escaped_character_counts_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients escape everything beyond ASCII: 6 bytes for a character that takes 2 in memory."""
    monkeypatch.setattr(large_bodies, "MAX_TEXT_BYTES", TEXT)
    assert parse_in_pieces(json.dumps({"text": text}).encode())["text"] == text


@pytest.mark.parametrize("end", [b",}", b"}x", b',"\xff":1}'])
def test_a_body_that_is_not_valid_is_not_called_too_large(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "MAX_TEXT_BYTES", TEXT)
    body = orjson.dumps({"text": "a" * (TEXT // 2), "x": EMOJI})
    assert parse_in_pieces(body)["x"] == EMOJI
    with pytest.raises(orjson.JSONDecodeError):
        parse_in_pieces(body[:-1] + end)


def test_many_small_objects_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "PIECE_BYTES", 0)
    monkeypatch.setattr(large_bodies.msgspec.json, "decode", None)
    content = {"metadata": [{}] * (large_bodies.MAX_PIECES + 1)}
    assert parse_in_pieces(orjson.dumps(content)) == content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [[1] * (MAX_TOKEN_IDS // 4)] * 5}),
        ("/v1/completions", {"prompt": [[1] * (MAX_TOKEN_IDS // 4)] * 5}),
        ("/completion", {"prompt": ["a", *[[1] * (MAX_TOKEN_IDS // 4)] * 5]}),
        ("/v1/embeddings", {"input": [[1] * (MAX_TOKEN_IDS // 4)] * 5}),
        ("/v1/score", {"query": [1], "items": [[1] * (MAX_TOKEN_IDS // 4)] * 5, "label_token_ids": [1]}),
        ("/v1/score", {"query": [1] * (MAX_TOKEN_IDS + 1), "items": [[1]], "label_token_ids": [1]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_TEXT_PARTS // 4)}] * 5},
        ),
        (
            "/v1/responses",
            {"input": [{**OUTPUT_ITEM, "output": [{"type": "input_text", "text": "a"}] * (MAX_TEXT_PARTS // 4)}] * 5},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * MAX_TOOL_CALLS}
                    for _ in range(MAX_TEXT_PARTS // MAX_TOOL_CALLS + 1)
                ]
            },
        ),
    ],
)
def test_more_than_can_be_checked_at_once_is_a_413(path: str, body: dict[str, Any]) -> None:
    response = with_engine(lambda engine: engine.post(path, body))
    assert response.status_code == 413
    assert "the limit is" in response.json()["error"]["message"]


TEXTS = ["a" * 40_000] * 30
IDS = [[1] * 2000] * 30
CHAT_OF_TEXT = [{"role": "user", "content": "a" * 140_000}]


@pytest.mark.parametrize(
    ("path", "body", "many"),
    [
        ("/completion", {"prompt": ["a"] * 30, "grammar": 'root ::= "a"\n# ' + "x" * 60_000}, {"n_cmpl": 64}),
        ("/completion", {"prompt": TEXTS}, {"n_cmpl": 64}),
        ("/completion", {"prompt": IDS}, {"n_cmpl": 64}),
        ("/v1/completions", {"prompt": TEXTS, "echo": True, "max_tokens": 1}, {"n": 64}),
        ("/v1/completions", {"prompt": IDS, "echo": True, "max_tokens": 1}, {"n": 64}),
        ("/v1/completions", {"prompt": TEXTS, "return_token_ids": True}, {"n": 64}),
        ("/v1/chat/completions", {"messages": CHAT_OF_TEXT, "return_token_ids": True}, {"n": 64}),
        ("/generate", {"text": TEXTS, "return_prompt_token_ids": True}, {"sampling_params": {"n": 64}}),
        ("/generate", {"input_ids": IDS, "return_prompt_token_ids": True}, {"sampling_params": {"n": 64}}),
    ],
)
def test_what_all_answers_to_a_body_repeat_is_limited(path: str, body: dict[str, Any], many: dict[str, Any]) -> None:
    """Each of them may have its prompt, and its settings."""

    async def check(engine: FakeEngine) -> None:
        refused = await engine.post(path, {**body, **many})
        assert refused.status_code == 413
        assert f"the limit is {MAX_REPEATED}" in refused.json()["error"]["message"]
        assert not engine.sent
        assert (await engine.post(path, body)).status_code == 200

    with_engine(check)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXTS, "n": 64, "max_tokens": 1}),
        ("/generate", {"text": TEXTS, "sampling_params": {"n": 64, "max_new_tokens": 1}}),
    ],
)
def test_answers_that_do_not_repeat_their_prompts_may_be_many(path: str, body: dict[str, Any]) -> None:
    async def check(engine: FakeEngine) -> None:
        assert (await engine.post(path, body)).status_code == 200

    with_engine(check)


# --- the tokenizer ---


class Counting(SimTokenizer):
    decoded = 0
    has_table = True

    @property
    def byte_table(self) -> ByteTable | None:  # type: ignore[override]
        return super().byte_table if self.has_table else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.decoded += 1
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(("has_table", "decoded"), [(True, 0), (False, 3)])
def test_each_token_is_read_once_at_most_however_often_it_is_asked_for(has_table: bool, decoded: int) -> None:
    counting = Counting()
    counting.has_table = has_table
    questions = RequestTokenizer(counting, MissingTemplate(), ModelLimits(CONTEXT, VOCAB)).questions
    for i in range(3):
        answer = questions.answer(EncodeReq(texts=["abcab" * 20, "cab"], pieces=True, id=i))
        assert isinstance(answer, Encoded)
        assert answer.pieces == [list("abcab" * 20), list("cab")]
    assert counting.decoded == decoded
