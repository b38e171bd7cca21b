"""Fields that no API here knows: ignored and named, refused, or ignored silently, at every level of every body."""

from __future__ import annotations

import logging
import re
import tracemalloc
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.endpoints import BODY_MODELS
from support.fake_engine import FakeEngine, with_engine

from pdserve.runtime.web.body import MAX_PROMPTS
from pdserve.server.http.bodies.field_names import (
    MAX_FIELDS,
    MAX_HEADER,
    MAX_LOGGED,
    MAX_NAMED,
    MAX_OBJECTS,
    FieldNames,
    UnknownFields,
)
from pdserve.server.http.errors import ApiError
from pdserve.server.http.native.schemas import GenerateBody
from pdserve.server.http.openai.schemas import ChatBody, CompletionBody
from pdserve.server.http.responses.items import MAX_ITEMS
from pdserve.server.http.responses.schemas import ResponsesBody

HEADER = "x-pdserve-ignored"
USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
ONE_TOKEN = {"max_new_tokens": 1}
LOGGER = "pdserve.server.http.bodies.field_names"


def post(path: str, body: dict[str, Any], unknown: UnknownFields = "warn") -> httpx.Response:
    async def run(engine: FakeEngine) -> httpx.Response:
        return await engine.post(path, body)

    return with_engine(run, unknown_fields=unknown)


def test_fields_are_known_by_the_names_that_clients_write() -> None:
    schema = {"type": "object"}
    for asked in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
    ):
        answer = post(CHAT, {"messages": [USER], "max_tokens": 1, **asked}, "refuse")
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text


def test_names_are_checked_in_the_longest_list_that_is_served() -> None:
    assert max(MAX_ITEMS, MAX_PROMPTS) <= MAX_OBJECTS
    items = [USER] * (MAX_ITEMS - 1) + [{**USER, "opts": 1}]
    named = FieldNames("warn").check(ResponsesBody, {"input": items})
    assert named == f"input[{MAX_ITEMS - 1}].opts".encode()


BODIES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{**USER, "opts": {"a": 1}}], "max_tokens": 1}, "messages[0].opts"),
    (
        CHAT,
        {
            "messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "y": 0}],
            "mirostat": 2,
        },
        "messages[1].content[0].x, messages[1].y, mirostat",
    ),
    (CHAT, {"messages": [USER], "stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
    (CHAT, {"messages": [USER], "chat_id": "c", "session_id": "s"}, "chat_id, session_id"),
    (CHAT, {"messages": [USER], "temprature": 0.1}, "temprature;did-you-mean=temperature"),
    (CHAT, {"messages": [USER], "max_new_tokens": 3}, "max_new_tokens;did-you-mean=max_tokens"),
    # Known, and ignored: what other servers would act on.
    (CHAT, {"messages": [{**USER, "cache_control": {}}], "verbosity": "low"}, "messages[0].cache_control, verbosity"),
    ("/v1/completions", {"prompt": "a", "typical_p": 0.9, "n_predict": 4}, "typical_p, n_predict"),
    ("/generate", {"text": "a", "sampling_params": {**ONE_TOKEN, "tfs_z": 1}}, "sampling_params.tfs_z"),
    (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [ONE_TOKEN, {**ONE_TOKEN, "top_K": 1}]},
        "sampling_params[1].top_K;did-you-mean=top_k",
    ),
    (
        "/generate",
        {"text": "a", "temperature": 0, "sampling_params": ONE_TOKEN},
        "temperature;did-you-mean=sampling_params.temperature",
    ),
    ("/tokenize", {"prompt": "a", "mirostat": 1}, "mirostat"),
    ("/detokenize", {"tokens": [1], "mirostat": 1}, "mirostat"),
    ("/abort_request", {"abort_all": True, "why": "x"}, "why"),
]


@pytest.mark.parametrize(("path", "body", "named"), BODIES)
def test_what_is_not_known_is_ignored_and_named(path: str, body: dict[str, Any], named: str) -> None:
    response = post(path, body)
    assert (response.status_code, response.headers.get(HEADER)) == (200, named), response.text


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, _ in BODIES])
def test_it_can_be_ignored_silently(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        response = post(path, body, "ignore")
    assert (response.status_code, response.headers.get(HEADER)) == (200, None)
    assert not [r for r in caplog.records if r.name == LOGGER]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [USER, {**USER, "opts": 1}]}, "messages[1].opts: there is no such field"),
        (CHAT, {"messages": [USER], "mirostat": None}, "mirostat: there is no such field"),
        (
            CHAT,
            {"messages": [USER], "temprature": 1},
            'temprature: there is no such field; did you mean "temperature"?',
        ),
        ("/generate", {"text": "a", "top_p": 1}, 'top_p: there is no such field; it belongs in "sampling_params"'),
    ],
)
def test_it_can_be_refused(path: str, body: dict[str, Any], message: str) -> None:
    error = post(path, body, "refuse").json()["error"]
    assert (error["status"], error["message"], error["param"]) == (400, message, message.partition(":")[0])


@pytest.mark.parametrize("unknown", ["warn", "refuse", "ignore"])
def test_what_is_known_and_would_change_the_answer_is_refused_in_any_case(unknown: UnknownFields) -> None:
    for path, body, param in (
        (CHAT, {"messages": [USER, {**USER, "audio": {"id": "a"}}]}, "messages[1].audio"),
        (CHAT, {"messages": [USER], "bad_words": ["a"]}, "bad_words"),
        ("/generate", {"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
    ):
        error = post(path, body, unknown).json()["error"]
        assert (error["status"], error["param"]) == (400, param)


@pytest.mark.parametrize("unknown", ["warn", "refuse", "ignore"])
def test_an_order_that_means_everything_without_its_fields_refuses_unknown_ones(unknown: UnknownFields) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation", "/drain"):
        error = post(path, {"tagz": ["weights"]}, unknown).json()["error"]
        assert (error["status"], error["param"]) == (400, "tagz")
    assert {body.refuses_unknown for body in BODY_MODELS.values() if body.may_be_left_out} == {True}


def test_an_error_and_a_stream_name_it_too() -> None:
    error = post(CHAT, {"messages": [USER], "mirostat": 1, "temperature": "hot"})
    assert (error.status_code, error.headers[HEADER]) == (400, "mirostat")
    stream = post(CHAT, {"messages": [USER], "mirostat": 1, "max_tokens": 1, "stream": True})
    assert (stream.status_code, stream.headers[HEADER]) == (200, "mirostat")


def test_a_large_body_is_read_the_same_way() -> None:
    """It is parsed and checked on another thread."""
    large = {"messages": [{**USER, "content": "x" * 100_000, "opts": 1}], "max_tokens": 1}
    response = post(CHAT, large)
    assert (response.status_code, response.headers[HEADER]) == (200, "messages[0].opts")
    response = post(CHAT, {**large, "temperature": "hot"})
    assert (response.status_code, response.headers[HEADER]) == (400, "messages[0].opts")
    assert post(CHAT, large, "refuse").json()["error"]["param"] == "messages[0].opts"


def test_null_is_not_given() -> None:
    response = post(CHAT, {"messages": [USER], "mirostat": None, "store": None, "max_tokens": 1})
    assert (response.status_code, response.headers.get(HEADER)) == (200, None)


def test_the_log_tells_a_name_once_wherever_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    names = FieldNames("warn")
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(3):
            names.check(
                ChatBody, {"messages": [{**USER, "opts": 1}, {**USER, "opts": 2}], "temprature": 1, "store": True}
            )
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "clients send messages[].opts, which is unknown here and ignored"),
        ("WARNING", 'clients send temprature, which is unknown here and ignored; did you mean "temperature"?'),
        ("INFO", "clients send store, which is accepted and ignored here"),
    ]


def test_the_log_tells_only_so_many_names(caplog: pytest.LogCaptureFixture) -> None:
    names = FieldNames("warn")
    with caplog.at_level(logging.INFO, LOGGER):
        for i in range(2 * MAX_LOGGED):
            names.check(CompletionBody, {"prompt": "a", f"zz{i}": 1})
    assert len(caplog.records) == MAX_LOGGED + 1
    assert "no others are told" in caplog.records[-1].getMessage()


def test_a_body_has_only_so_many_fields() -> None:
    for path, body, param in (
        ("/generate", {"text": "a", **{f"zz{i}": 1 for i in range(MAX_FIELDS)}}, None),
        (CHAT, {"messages": [USER, dict.fromkeys(map(str, range(MAX_FIELDS + 1)))]}, "messages[1]"),
    ):
        error = post(path, body).json()["error"]
        assert (error["status"], error["param"]) == (400, param)


def test_the_header_is_bounded() -> None:
    many = FieldNames("warn").check(GenerateBody, {f"zz{i}": 1 for i in range(100)})
    assert (many.count(b", "), many[-5:]) == (MAX_NAMED, b", ...")
    long = FieldNames("warn").check(GenerateBody, {f"{i}" + "x" * 60: 1 for i in range(30)})
    assert MAX_HEADER - 100 < len(long) <= MAX_HEADER
    assert FieldNames("warn").check(GenerateBody, {"y" * 10_000: 1}) == b"y" * 64 + b"..."


@pytest.mark.parametrize("level", ["warn", "refuse"])
def test_a_long_name_is_not_kept_when_its_body_is_gone(level: UnknownFields) -> None:
    size = 1 << 22
    tracemalloc.start()
    try:
        for i in range(3):
            with suppress(ApiError):
                FieldNames(level).check(GenerateBody, {f"{i}" * size: 1})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < size


@given(st.dictionaries(st.text(max_size=80), st.integers(), max_size=4), st.integers(0, 3))
def test_names_are_printable_ascii_everywhere(unknown: dict[str, int], level: int) -> None:
    places: list[tuple[Any, dict[str, Any]]] = [
        (GenerateBody, {"text": "a", **unknown}),
        (GenerateBody, {"text": "a", "sampling_params": [unknown]}),
        (ChatBody, {"messages": [{**USER, **unknown}]}),
        (ChatBody, {"messages": [{**USER, "content": [{"type": "text", "text": "a", **unknown}]}]}),
    ]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        value = FieldNames("warn").check(*places[level])
    except ApiError:  # the name of a field that is known and not served
        return
    finally:
        logger.removeHandler(handler)
    items = value.decode("ascii").split(", ") if value else []
    token = r"[!#$&'*+\-.^_`|~\[\]%0-9A-Za-z]*"
    assert all(re.fullmatch(rf"{token}(;did-you-mean={token})?", item) for item in items), value
    assert all(re.fullmatch(r"[ -~]{1,400}", record) for record in records), records
