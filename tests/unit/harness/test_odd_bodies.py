"""Orders with every kind of body that they don't mean: a 4xx that says why, or what is documented, never a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from pydantic import BaseModel
from support.endpoints import BODY_MODELS, GENERATION_PATHS
from support.fake_engine import FakeEngine, with_engine
from support.router_rig import Rig, scenario

from pdserve.messages.base import Message
from pdserve.messages.control import RoleReq, RoleResult
from pdserve.messages.memory import MemoryReq, MemoryResult, ResizeReq, ResizeResult
from pdserve.messages.moves import MigrateReq, MigrateResult
from pdserve.messages.profiling import StartProfileReq, StopProfileReq
from pdserve.router.errors import parse_error
from pdserve.runtime.web.moved_answer import MOVED_PATH

LONG = 1000
OFF = 501
"""What an option would switch on."""
DEEP = b"[" * 100_000
BODIES: dict[str, bytes] = {
    "none": b"",
    "white space": b" \n",
    "an empty object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "a text": b'"rid"',
    "not JSON": b"rid=7&x",
    "half of it": b'{"rid": "a',
    "two of them": b'{"rid": "a"} {"rid": "b"}',
    "zeros": bytes(64),
    "another encoding": '{"rid": "ä"}'.encode("utf-16"),
    "invalid UTF-8": b'{"rid": "\xff\xfe"}',
    "a lone surrogate": b'{"rid": "\\ud800"}',
    "an unknown field": b'{"no_such_field": 1}',
    "an unknown field with a long name": b'{"' + b"x" * 100_000 + b'": 1}',
    "an unknown field that can't be shown": '{"\\u0000\\n\u202e": 1}'.encode(),
    "nested garbage": b'{"rid": {"a": [{"b": [[[{}, null]]]}]}}',
    "deep lists": DEEP,
    "deep lists within": b'{"rid": ' + DEEP + b"}",
    "not a number": b'{"wait_s": NaN}',
    "more than infinite": b'{"wait_s": 1e999}',
}
OBJECTS = {
    *("none", "an empty object", "an unknown field", "an unknown field with a long name"),
    *(
        "an unknown field that can't be shown",
        "nested garbage",
        "not a number",
        "more than infinite",
        "deep lists within",
    ),
}
VALUES: dict[str, bytes] = {
    "a text": b'"x"',
    "an empty text": b'""',
    "a control character": b'"\\u0000"',
    "a long text": b'"' + b"x" * 100_000 + b'"',
    "the way up": b'"../../etc/passwd"',
    "true": b"true",
    "zero": b"0",
    "minus one": b"-1",
    "a half": b"0.5",
    "2^63": b"9223372036854775808",
    "-2^63-1": b"-9223372036854775809",
    "a hundred digits": b"9" * 100,
    "1e308": b"1e308",
    "a list": b"[]",
    "a list of lists": b"[[[]]]",
    "a list of everything": b'[1, "x", null, {}, [], true, -1.5]',
    "an object": b"{}",
    "an object of everything": b'{"x": [1, null, {}], "role": {}, "name": 1, "": ""}',
}
MEANS: dict[tuple[str, str], str] = {
    ("/release_memory_occupation", "none"): "all that is held",
    ("/release_memory_occupation", "an empty object"): "all that is held",
    ("/resume_memory_occupation", "none"): "all that was given back",
    ("/resume_memory_occupation", "an empty object"): "all that was given back",
    ("/drain", "none"): "what runs is finished here",
    ("/drain", "an empty object"): "what runs is finished here",
    ("/start_profile", "none"): "all that the device has, up to the limits",
    ("/start_profile", "an empty object"): "all that the device has, up to the limits",
    ("/stop_profile", "none"): "the profile that runs",
    ("/stop_profile", "an empty object"): "the profile that runs",
}
"""docs/http-api.md. Beside these, ``/flush_cache`` reads no body."""
SESSION_PATH, SLOTS_PATH = "/kv/sessions/{name:path}", "/slots/{id:path}"
PATHS: dict[str, type[BaseModel] | None] = {**BODY_MODELS, MOVED_PATH: None}


class Instance(FakeEngine):
    """Answers orders, too."""

    def _answer(self, question: Message) -> None:
        if isinstance(question, MemoryReq):
            self._soon(MemoryResult([], 0, 0.0, id=question.id))
        elif isinstance(question, ResizeReq):
            self._soon(ResizeResult(question.max_total_tokens, 1, 0, id=question.id))
        elif isinstance(question, RoleReq):
            self._soon(RoleResult(question.role, "unified", id=question.id))
        elif isinstance(question, MigrateReq):
            self._soon(MigrateResult(0.0, id=question.id))
        else:
            super()._answer(question)


def message_of(answer: httpx.Response) -> str:
    """Return the message of an error, in the shape of any API."""
    error = parse_error(answer.content)
    assert error is not None, answer.text[:300]
    return str(error["message"])


def check(path: str, name: str, answer: httpx.Response, *, may_mean_something: bool) -> None:
    status, text = answer.status_code, answer.text[:300]
    assert status < 500 or status == OFF, (path, name, text)
    if status >= 400:
        message = message_of(answer)
        assert 3 < len(message) < LONG, (path, name, text)
        assert message.isprintable(), (path, name, text)
    else:
        assert may_mean_something, (path, name, text)


async def is_alive(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    assert (await client.post("/generate", json={"text": "x"})).json()["text"].startswith("w0 ")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"kv_sessions_dir": str(tmp_path / "sessions"), "handover": "on"}


@scenario()
async def test_a_router_passes_them_on_or_says_why(rig: Rig) -> None:
    """What it reads itself it refuses, and what it doesn't is the instances' to refuse."""
    prefill, decode = await rig.instance(), await rig.instance()
    client = await rig.route([prefill], [decode])
    prefill.refuses = decode.refuses = True
    for path in (
        *GENERATION_PATHS,
        "/tokenize",
        "/detokenize",
        "/abort_request",
        "/kv/snapshot",
        "/kv/restore",
        "/slots/0?action=save",
    ):
        for name, body in BODIES.items():
            answer = await client.post(path, content=body)
            # A path that knows no fields still refuses a body that is no object.
            check(path, name, answer, may_mean_something=path in GENERATION_PATHS and name in OBJECTS)
            if path in GENERATION_PATHS and name not in OBJECTS:
                assert message_of(answer) != "busy", (path, name)
    assert [
        request.body for request in (*prefill.requests, *decode.requests) if not isinstance(request.body, dict)
    ] == []
    assert (await client.get("/health")).status_code == 200


def path_of(path: str) -> str:
    return "/slots/0?action=save" if path == SLOTS_PATH else path


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_none_of_ours(path: str, options: dict[str, Any]) -> None:
    async def run() -> None:
        engine = Instance(**options)
        async with engine.http() as client:
            for name, body in BODIES.items():
                answer = await client.post(path_of(path), content=body)
                check(path, name, answer, may_mean_something=(path, name) in MEANS)
            await is_alive(client)
            # Nothing was asked of the engine that the table does not say; the supervisor drains.
            kinds = MemoryReq | ResizeReq | RoleReq | MigrateReq | StartProfileReq | StopProfileReq
            orders = [q for q in engine.questions if isinstance(q, kinds)]
            assert len(orders) == sum(1 for meant, _ in MEANS if meant == path != "/drain")

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", [path for path, body in PATHS.items() if body is not None and path not in GENERATION_PATHS]
)
def test_a_field_that_holds_something_else(path: str, options: dict[str, Any]) -> None:
    """One field at a time, beside nothing and beside what makes an order of it; and what is asked for is no crash."""
    schema = PATHS[path]
    assert schema is not None
    whole: dict[str, Any] = {
        "text": "x",
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "ids": [1],
        "tokens": [1],
        "rid": "r",
        "name": "n",
        "filename": "n",
        "role": "decode",
        "max_total_tokens": 64,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 1,
    }
    needed = {name: value for name, value in whole.items() if name in schema.model_fields}
    if path == "/kv/snapshot":
        needed = {"name": "n", "text": "x"}
    others = {name: orjson.dumps(value) for name, value in needed.items()}

    def body(fields: dict[str, bytes]) -> bytes:
        return b"{" + b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in fields.items()) + b"}"

    async def run() -> None:
        engine = Instance(**options)
        async with engine.http() as client:
            for field in schema.model_fields:
                for name, value in VALUES.items():
                    answer = await client.post(path_of(path), content=body(others | {field: value}))
                    check(path, f"{field}: {name}", answer, may_mean_something=True)
                    if name in ("a list of everything", "a hundred digits", "-2^63-1"):
                        assert answer.status_code >= 400, (path, field, name)
            await is_alive(client)

    asyncio.run(run())


def test_what_needs_no_body_reads_none_and_names_may_be_anything(options: dict[str, Any]) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            for name, body in BODIES.items():
                answer = await client.post("/flush_cache", content=body)
                assert (answer.status_code, answer.json()["success"]) == (200, True), name
            for odd in ("..%2F..%2Fx", "%00", "%FF", "a" * 300, "%F0%9F%98%80", ".", "a/b", "-", "%0A"):
                answer = await client.delete(SESSION_PATH.replace("{name:path}", odd))
                check(SESSION_PATH, odd, answer, may_mean_something=False)
                for action in ("save", "restore", "erase", "", "%00") if odd != "." else ():
                    answer = await client.post(f"/slots/{odd}?action={action}", json={"filename": "n"})
                    check(SLOTS_PATH, odd, answer, may_mean_something=False)
            await is_alive(client)

    with_engine(run, **options)
