"""Requests on their way through the tokenizer process: checks, batches, order."""

import re

import pytest
from support.rendering import rendered

from pdserve.messages.base import unpack_i32
from pdserve.messages.channel import encode
from pdserve.messages.control import Ping
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.decode import Codec
from pdserve.messages.outputs import ReqError
from pdserve.messages.packed_text import PackedText, pack, unpack
from pdserve.messages.readout import Readout
from pdserve.messages.requests import (
    AbortReq,
    Bootstrap,
    GenerateReq,
    LogprobOptions,
    TokenizeReq,
)
from pdserve.messages.routes import ToTokenizer
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.text import DecodeReq, EncodeReq, LimitsReq
from pdserve.model_files.model_limits import ModelLimits
from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.load import load_tokenizer
from pdserve.server import prompt_encoder
from pdserve.server.options import ServerOptions
from pdserve.server.prompt_encoder import MissingTemplate
from pdserve.server.request_tokenizer import RequestTokenizer
from pdserve.server.tokenizer_process import route

CONTEXT = 32
VOCAB = 49152
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(ServerOptions())


@pytest.fixture
def requests(smollm):
    return RequestTokenizer(smollm, ChatTemplate(TEMPLATE, {}), ModelLimits(CONTEXT, VOCAB))


def make_req(rid="r", **fields):
    sampling = fields.pop("sampling", {})
    return TokenizeReq(rid=rid, sampling=SamplingParams(seed=1, **sampling), arrival=1.5, **fields)


def one(requests, **fields):
    reqs = [make_req(**fields)]
    [answer] = requests.tokenize(reqs, rendered(requests, reqs))
    return answer


def chat(content, role="user"):
    return Conversation([ChatMessage(role, content)])


def test_a_request_keeps_everything_that_the_scheduler_needs(requests, smollm):
    fields = {
        "logprobs": LogprobOptions(0, 3),
        "bootstrap": Bootstrap("127.0.0.1", 8998, 1 << 62),
        "extra_key": "tenant",
        "stream": True,
        "return_prompt": True,
    }
    out = one(requests, text="Hello world", sampling={"stop": ("x",), "max_new_tokens": 4}, **fields)
    assert unpack_i32(out.input_ids).tolist() == smollm.encode_batch(["Hello world"], add_special_tokens=True)[0]
    assert out.sampling == SamplingParams(seed=1, stop=("x",), max_new_tokens=4)
    assert (out.rid, out.arrival) == ("r", 1.5)
    assert {name: getattr(out, name) for name in fields} == fields


def test_texts_ids_and_chats_that_arrive_together_are_answered_in_order(requests, smollm):
    reqs = [
        make_req("a", text="one"),
        make_req("b", input_ids=[5, 6]),
        make_req("c", text=""),
        make_req("d", chat=chat("two")),
        make_req("e", text="three"),
    ]
    answers = requests.tokenize(reqs, rendered(requests, reqs))
    assert [a.rid for a in answers] == list("abcde")
    assert isinstance(answers[2], ReqError)
    [one_, two, three] = smollm.encode_batch(["one", "two", "three"], add_special_tokens=False)
    got = [unpack_i32(a.input_ids).tolist() for a in answers if isinstance(a, GenerateReq)]
    assert got == [one_, [5, 6], two, three]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({}, "text", "exactly one of text, input_ids, messages; found: none"),
        ({"text": "a", "input_ids": [1]}, "text", "found: text and input_ids"),
        ({"text": ""}, "text", "empty"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"chat": Conversation([])}, "messages", "empty"),
        ({"chat": chat("")}, "messages", "no tokens"),
        ({"input_ids": [1, VOCAB]}, "input_ids", f"token id {VOCAB} .* 0 to {VOCAB - 1}"),
        ({"input_ids": [1, -1]}, "input_ids", "token id -1"),
        ({"input_ids": [2**63]}, "input_ids", "vocabulary"),
        ({"input_ids": [1] * CONTEXT}, "input_ids", "32 tokens"),
        ({"text": "a b " * CONTEXT}, "text", "maximum context length is 32"),
        ({"text": "a" * 10_000_000}, "text", "maximum context length"),
        ({"chat": chat("a" * 10_000_000)}, "messages", "maximum context length"),
        ({"text": "a\ud800"}, "text", "surrogate"),
        ({"chat": chat("\udfff")}, "messages", "surrogate"),
        ({"chat": chat("a", "bad")}, "messages", "no such role"),
        ({"text": "a", "sampling": {"stop_token_ids": (1, VOCAB)}}, "stop_token_ids", "vocabulary"),
        ({"text": "a", "sampling": {"stop_token_ids": (-1,)}}, "stop_token_ids", "vocabulary"),
        ({"text": "a", "sampling": {"logit_bias": {1: 0.5, VOCAB: 50.0}}}, "logit_bias", "vocabulary"),
        ({"chat": chat("a"), "sampling": {"logit_bias": {2**31: 1.0}}}, "logit_bias", "ids go from 0 to 49151"),
        ({"text": "a", "sampling": {"stop": ("x", "")}}, "stop", "1 to"),
        ({"text": "a", "sampling": {"stop": ("x" * 5000,)}}, "stop", "5000"),
        ({"text": "a", "sampling": {"stop": ("x",) * 65}}, "stop", "at most 64"),
    ],
)
def test_a_bad_request_is_refused_with_its_field(requests, fields, field, message):
    out = one(requests, **fields)
    assert isinstance(out, ReqError)
    assert (out.rid, out.status, out.field) == ("r", 400, field)
    assert (out.code == "context_length_exceeded") == ("maximum context length" in out.message)
    assert re.search(message, out.message), out.message


def test_long_texts_arrive_as_utf8_and_give_the_same_tokens(smollm):
    requests = RequestTokenizer(smollm, ChatTemplate(TEMPLATE, {}), ModelLimits(1 << 20, VOCAB))
    text = "a café \U0001f600 " * 8000
    packed = pack(text)
    assert isinstance(packed, PackedText)
    assert unpack(packed) == text
    for plain, long in (({"text": text}, {"text": packed}), ({"chat": chat(text)}, {"chat": chat(packed)})):
        reqs = Codec(ToTokenizer, 1 << 30).decode(encode([make_req(**long)]))
        assert reqs == [make_req(**long)]
        [answer] = requests.tokenize(reqs, rendered(requests, reqs))
        assert answer == one(requests, **plain)
    halved = pack(text + "\udfff")
    for fields, field in (({"text": halved}, "text"), ({"chat": chat(halved)}, "messages")):
        out = one(requests, **fields)
        assert (out.status, out.field) == (400, field)
        assert "half of a surrogate pair" in out.message
    assert pack("a" * 100_000) == "a" * 100_000, "it takes a byte for each character in any case"


def test_a_huge_text_that_arrives_as_utf8_is_refused_as_it_is(requests, monkeypatch):
    monkeypatch.setattr(prompt_encoder, "unpack", None)
    huge = PackedText("\U0001f600".encode() * 1_000_000)
    for fields, field in (({"text": huge}, "text"), ({"chat": chat(huge)}, "messages")):
        out = one(requests, **fields)
        assert (out.status, out.field, out.code) == (400, field, "context_length_exceeded")
        assert f"{field} has at least 4000000 bytes" in out.message


def test_a_huge_text_is_refused_without_tokenizing_it(smollm, monkeypatch):
    requests = RequestTokenizer(smollm, MissingTemplate(), ModelLimits(CONTEXT, VOCAB))
    encoded = []
    monkeypatch.setattr(smollm, "encode_batch", lambda texts, **_: encoded.append(texts))
    assert isinstance(one(requests, text="é" * (CONTEXT * smollm.max_token_bytes // 2 + 1)), ReqError)
    assert encoded == []


def test_of_a_long_text_only_the_beginning_is_tokenized_to_refuse_it(requests, smollm, monkeypatch):
    encode, lengths = smollm.encode_batch, []

    def watch(texts, **options):
        lengths.extend(map(len, texts))
        return encode(texts, **options)

    monkeypatch.setattr(smollm, "encode_batch", watch)
    out = one(requests, text="1" * (CONTEXT * 80))
    assert isinstance(out, ReqError)
    assert lengths == [CONTEXT * 16]


def test_the_longest_text_that_could_fit_is_tokenized(requests, smollm):
    table = smollm.byte_table.pieces
    longest = max(table, key=len).decode()
    out = one(requests, text=longest * (CONTEXT - 1))
    assert isinstance(out, GenerateReq)


@pytest.mark.parametrize("text", ["Hello" * 40, "\u4f60" * 16 * CONTEXT * 40, "x" * 10**6])
def test_a_text_that_may_be_truncated_is_cut_to_the_context(requests, smollm, text):
    cut = one(requests, text=text, readout=Readout("mean", truncate=True))
    tokens = smollm.encode_batch([text[:2000]], add_special_tokens=True)[0]
    assert unpack_i32(cut.input_ids).tolist() == tokens[: CONTEXT - 1]
    refused = one(requests, text=text, readout=Readout("mean"))
    assert (refused.status, refused.code) == (400, prompt_encoder.TOO_LONG)


def test_the_token_that_ends_a_text_is_not_cut_off(requests, smollm):
    end = smollm.eos_ids[0]
    for tokens, kept in ((CONTEXT - 1, CONTEXT - 2), (CONTEXT, CONTEXT - 2), (CONTEXT * 9, CONTEXT - 2)):
        cut = one(requests, input_ids=[5] * (tokens - 1) + [end], readout=Readout("last", truncate=True))
        assert unpack_i32(cut.input_ids).tolist() == [5] * kept + [end]


def test_half_a_surrogate_pair_is_refused_in_a_text_that_may_be_truncated(requests):
    refused = one(requests, text="ab\ud800", readout=Readout("mean", truncate=True))
    assert (refused.status, refused.field) == (400, "text")
    assert "surrogate pair at character 2" in refused.message


def test_no_chat_template_says_what_to_do(smollm):
    out = one(RequestTokenizer(smollm, MissingTemplate(), ModelLimits(CONTEXT, VOCAB)), chat=chat("hi"))
    assert (out.status, out.field) == (400, "messages")
    assert "--chat-template" in out.message


def test_output_is_cut_to_what_the_context_leaves(requests):
    out = one(requests, input_ids=[1] * (CONTEXT - 5), sampling={"max_new_tokens": 100, "min_new_tokens": 50})
    assert (out.sampling.max_new_tokens, out.sampling.min_new_tokens) == (5, 5)
    out = one(requests, input_ids=[1] * (CONTEXT - 1))
    assert out.sampling.max_new_tokens == 1


def test_every_id_of_the_vocabulary_may_have_a_bias(requests):
    bias = {0: 1.0, VOCAB - 1: -1.0}
    assert one(requests, text="a", sampling={"logit_bias": bias}).sampling.logit_bias == bias


def test_stop_ids_are_the_models_own_and_the_requests(requests):
    assert one(requests, text="a").stop_ids == (2,)
    assert one(requests, text="a", sampling={"stop_token_ids": (7, 2)}).stop_ids == (2, 7)
    assert one(requests, text="a", sampling={"stop_token_ids": (7,), "ignore_eos": True}).stop_ids == (7,)


def test_an_end_of_text_that_the_model_has_no_weights_for_is_left_out(smollm):
    requests = RequestTokenizer(smollm, MissingTemplate(), ModelLimits(CONTEXT, 2))
    assert one(requests, input_ids=[1]).stop_ids == ()


def test_a_text_whose_tokens_the_model_has_no_weights_for_is_refused(smollm):
    requests = RequestTokenizer(smollm, MissingTemplate(), ModelLimits(CONTEXT, 20))
    assert isinstance(one(requests, text="Hello"), ReqError)


def test_aborts_and_questions_keep_their_place_and_errors_go_back(requests):
    ping, abort = Ping(id=1), AbortReq(rid="a")
    routed = route(requests, [make_req("a", text="x"), abort, make_req("b", text=""), ping, make_req("c", text="y")])
    assert [getattr(m, "rid", None) for m in routed.to_scheduler] == ["a", "a", None, "c"]
    assert routed.to_scheduler[1] is abort
    assert routed.to_scheduler[2] is ping
    assert [e.rid for e in routed.to_http] == ["b"]


def test_special_tokens_are_added_as_the_request_says(smollm, monkeypatch):
    table = {False: [5], True: [1, 5]}
    requests = RequestTokenizer(smollm, ChatTemplate(TEMPLATE, {}), ModelLimits(CONTEXT, VOCAB))
    monkeypatch.setattr(
        smollm, "encode_batch", lambda texts, add_special_tokens: [table[add_special_tokens] for _ in texts]
    )
    for fields, special in (
        ({"text": "a"}, True),
        ({"text": "a", "add_special_tokens": False}, False),
        ({"chat": chat("a")}, False),
        ({"chat": chat("a"), "add_special_tokens": True}, True),
    ):
        out = one(requests, **fields)
        assert unpack_i32(out.input_ids).tolist() == table[special]


def test_questions_about_text_are_answered_here(requests, smollm):
    def ask(question):
        routed = route(requests, [question])
        assert routed.to_scheduler == []
        texts = [requests.render(q) if isinstance(q, EncodeReq) and q.chat else None for q in routed.questions]
        [answer] = [*routed.to_http, *map(requests.questions.answer, routed.questions, texts)]
        assert answer.id == question.id
        return answer

    limits = ask(LimitsReq(id=1))
    assert (limits.context_length, limits.vocab_size) == (CONTEXT, VOCAB)
    encoded = ask(EncodeReq(id=2, texts=["Hello world", ""], pieces=True))
    [ids] = smollm.encode_batch(["Hello world"], add_special_tokens=True)
    assert (encoded.token_ids, encoded.pieces) == ([ids, []], [["Hello", " world"], []])
    assert ask(EncodeReq(id=3, chat=chat("Hello world"))).token_ids == [ids]
    assert "no such role" in ask(EncodeReq(id=4, chat=chat("a", "bad"))).error
    assert ask(DecodeReq(id=5, token_ids=[ids, []])).texts == ["Hello world", ""]
    assert "vocabulary" in ask(DecodeReq(id=6, token_ids=[[VOCAB]])).error
