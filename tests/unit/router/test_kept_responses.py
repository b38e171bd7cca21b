"""Responses that are kept by the server that the client asks: an instance alone, or a router in front of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send
from support.fake_engine import FakeEngine
from support.machine import limit
from support.responses_api import check_stream, events_of
from support.router_rig import Rig
from support.served_app import serving

from pdserve.messages.conversation import ChatMessage
from pdserve.messages.outputs import FinishType, ReqError, TextBatch
from pdserve.router.options import RouterOptions
from pdserve.runtime.web import body as body_module
from pdserve.runtime.web.responses import request as request_module
from pdserve.runtime.web.responses.keeper import LARGE_BYTES, ResponseKeeper, open_responses
from pdserve.runtime.web.responses.request import NotKept, ResponseRequest
from pdserve.runtime.web.responses.response_store import KeptResponse, NoFiles, ResponseStore, StoreLimits
from pdserve.server.http import app as app_module
from pdserve.server.http.responses.answers import ResponseAnswer

PATH = "/v1/responses"
SHORT = {"max_output_tokens": 2}
SAID = "w0 w1 "


class Front(NamedTuple):
    """A server with kept responses, and the engine behind it."""

    engine: FakeEngine
    client: httpx.AsyncClient
    instance: httpx.AsyncClient

    async def create(self, given: Any, **fields: Any) -> dict[str, Any]:
        """Return a response, from a whole answer or from the end of a stream."""
        answer = await self.client.post(PATH, json={"input": given, **SHORT, **fields})
        assert answer.status_code == 200, answer.text
        return check_stream(events_of(answer.text)) if fields.get("stream") else answer.json()

    async def status(self, response_id: str) -> int:
        return (await self.client.get(f"{PATH}/{response_id}")).status_code


@asynccontextmanager
async def front(kind: str, *, hold: bool = False, **options: Any) -> AsyncIterator[Front]:
    """Serve an engine, and a router in front of it if ``kind`` is "router". The options are the front's."""
    engine = FakeEngine(hold=hold, **(options if kind == "instance" else {}))
    async with serving(engine) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=limit(10)) as instance:
            if kind == "instance":
                yield Front(engine, instance, instance)
                return
            rig = Rig(**options)
            try:
                yield Front(engine, await rig.route(worker=[SimpleNamespace(url=url, health=200)]), instance)
            finally:
                await rig.close()


def scene(check: Callable[[Front], Awaitable[None]], kind: str, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(limit(20)), front(kind, **options) as served:
            await check(served)

    asyncio.run(run())


both = pytest.mark.parametrize("kind", ["instance", "router"])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_by_the_id_of_its_last_response(kind: str, stream: bool) -> None:
    async def check(served: Front) -> None:
        first = await served.create("a", instructions="Be brief.", stream=stream)
        second = await served.create("b", previous_response_id=first["id"], stream=stream)
        third = await served.create(
            [{"role": "user", "content": "c"}], previous_response_id=second["id"], store=False, stream=stream
        )
        turns = [ChatMessage("user", "a"), ChatMessage("assistant", SAID), ChatMessage("user", "b")]
        chats = [request.chat.messages for request in served.engine.sent if request.chat is not None]
        assert chats[1] == turns
        assert chats[2] == [*turns, ChatMessage("assistant", SAID), ChatMessage("user", "c")]
        assert (second["previous_response_id"], third["previous_response_id"]) == (first["id"], second["id"])
        for response in (first, second):
            answer = await served.client.get(f"{PATH}/{response['id']}")
            assert answer.json() == response
            ResponseAnswer.model_validate_json(answer.content, strict=True)
        assert await served.status(third["id"]) == 404
        if served.client is not served.instance:
            assert (await served.instance.get(f"{PATH}/{first['id']}")).status_code == 404

    scene(check, kind)


@both
def test_a_response_is_deleted(kind: str) -> None:
    async def check(served: Front) -> None:
        response_id = (await served.create("a"))["id"]
        answer = await served.client.delete(f"{PATH}/{response_id}")
        assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
        assert await served.status(response_id) == 404
        again = await served.client.delete(f"{PATH}/{response_id}")
        assert (again.status_code, again.json()["error"]["param"]) == (404, "id")
        gone = await served.client.post(PATH, json={"input": "b", "previous_response_id": response_id})
        error = gone.json()["error"]
        assert (gone.status_code, error["param"]) == (400, "previous_response_id")
        assert error["code"] == "previous_response_not_found"
        assert len(served.engine.sent) == 1

    scene(check, kind)


@both
def test_methods_of_the_paths(kind: str) -> None:
    async def check(served: Front) -> None:
        response_id = (await served.create("a"))["id"]
        path = f"{PATH}/{response_id}"
        assert (await served.client.head(path)).status_code == 200
        assert (await served.client.options(path)).headers["allow"] == "GET, DELETE, HEAD, OPTIONS"
        refused = await served.client.post(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, DELETE, HEAD, OPTIONS")
        assert (await served.client.post(f"{PATH}/", json={"input": "a", **SHORT})).status_code == 200
        stream = await served.client.get(path, params={"stream": "true"})
        assert (stream.status_code, stream.json()["error"]["param"]) == (400, "stream")
        ended = await served.client.post(f"{path}/cancel")
        assert (ended.status_code, "incomplete" in ended.text) == (400, True)
        assert (await served.client.post(f"{PATH}/none/cancel")).status_code == 404

    scene(check, kind)


@both
def test_an_item_is_named_by_its_id(kind: str) -> None:
    async def check(served: Front) -> None:
        first = await served.create("a")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await served.create([{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}])
        chat = served.engine.sent[1].chat
        assert chat is not None
        assert chat.messages[1] == ChatMessage("assistant", SAID)

    scene(check, kind)


async def begun(served: Front, lines: list[str]) -> tuple[str, asyncio.Task[None]]:
    """Begin a stream, of which one token is read. Return its id, and the task that collects its ``lines``."""

    async def collect() -> None:
        async with served.client.stream("POST", PATH, json={"input": "a", "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)

    task = asyncio.create_task(collect())
    await served.engine.wait_for(lambda: bool(served.engine.requests))
    (request,) = served.engine.requests
    served.engine.client.dispatch([TextBatch([served.engine.text(request, "one ", [0])])])
    while not any('"delta":"one "' in line for line in lines):
        await asyncio.sleep(0.001)
    created = next(line for line in lines if line.startswith("data: "))
    return json.loads(created.removeprefix("data: "))["response"]["id"], task


async def until_kept(served: Front, response_id: str, status: str) -> dict[str, Any]:
    """Wait until a response has ended with ``status``, and return it."""
    while True:
        answer = (await served.client.get(f"{PATH}/{response_id}")).json()
        if answer["status"] == status:
            return answer


@both
def test_a_running_response_is_cancelled(kind: str) -> None:
    async def check(served: Front) -> None:
        lines: list[str] = []
        response_id, task = await begun(served, lines)
        running = (await served.client.get(f"{PATH}/{response_id}")).json()
        assert (running["status"], running["output"]) == ("in_progress", [])
        deleted = await served.client.delete(f"{PATH}/{response_id}")
        assert (deleted.status_code, f"{response_id}/cancel" in deleted.text) == (400, True)
        cancelled = await served.client.post(f"{PATH}/{response_id}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        await task
        last = json.loads(lines[-2].removeprefix("data: "))
        assert (last["type"], last["response"]) == ("response.incomplete", cancelled.json())
        assert last["sequence_number"] == 5
        await served.engine.wait_for(lambda: bool(served.engine.aborts))
        assert (await served.client.post(f"{PATH}/{response_id}/cancel")).json() == cancelled.json()
        assert (await served.client.delete(f"{PATH}/{response_id}")).json()["deleted"] is True

    scene(check, kind, hold=True)


@both
def test_a_client_that_leaves_leaves_a_cancelled_response(kind: str) -> None:
    async def check(served: Front) -> None:
        response_id, task = await begun(served, [])
        task.cancel()
        answer = await until_kept(served, response_id, "cancelled")
        ResponseAnswer.model_validate(answer)
        assert (answer["output"], answer["error"]) == ([], None)

    scene(check, kind, hold=True)


@both
@pytest.mark.parametrize("how", ["failed", "incomplete", "cancelled"])
def test_a_response_is_kept_as_it_ended(kind: str, how: str) -> None:
    async def check(served: Front) -> None:
        lines: list[str] = []
        response_id, task = await begun(served, lines)
        (request,) = served.engine.requests
        if how == "failed":
            end: Any = ReqError(request.rid, 500, "it broke", "server_error")
        else:
            finish = FinishType.LENGTH if how == "incomplete" else FinishType.ABORT
            end = TextBatch([served.engine.text(request, "two", [1], finish)])
        served.engine.client.dispatch([end])
        await task
        answer = await until_kept(served, response_id, how)
        texts = [item["content"][0]["text"] for item in answer["output"]]
        assert texts == ([] if how == "failed" else ["one two"])
        assert answer["error"] == ({"code": "server_error", "message": "it broke"} if how == "failed" else None)

    scene(check, kind, hold=True)


@both
def test_responses_belong_to_a_key(kind: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ana secret-a\nbo secret-b\n")

    async def check(served: Front) -> None:
        answer = await served.client.post(PATH, json={"input": "a"}, headers={"x-api-key": "secret-a"})
        path = f"{PATH}/{answer.json()['id']}"
        for key, status in (("secret-b", 404), ("secret-a", 200), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await served.client.get(path, headers=headers)).status_code == status

    if kind == "instance":
        scene(check, kind, api_key_file=str(keys))
        return

    # The router checks no keys here, and shows the client's to instances, which may check it.
    async def unchecked(served: Front) -> None:
        headers = {"authorization": "Bearer secret-a"}
        answer = await served.client.post(PATH, json={"input": "a"}, headers=headers)
        path = f"{PATH}/{answer.json()['id']}"
        assert (await served.client.get(path, headers=headers)).status_code == 200
        assert (await served.client.get(path, headers={"authorization": "Bearer secret-b"})).status_code == 404
        assert (await served.client.get(path)).status_code == 404

    scene(unchecked, kind)


@pytest.mark.parametrize(
    "data",
    [
        *(b"{}", b"7", b"no JSON", b'{"response": 7}', b'{"response": {"id": 7}}', b'{"response": {"id": "\xff"}}'),
        b'{"response":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_an_answer_that_cannot_be_read_is_passed_on(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Instances may be other servers."""
    created = b"event: response.created\ndata: " + data + b"\n\n"
    pieces = [created, b"event: response.output_text.delta\ndata: x\n\n"]
    assert asyncio.run(passed_on(pieces, "r")) == (b"".join(pieces), 404, None)
    assert "is not kept" in caplog.text


@pytest.mark.parametrize("ending", [[b'event: error\ndata: {"type":"error","error":{}}\n\n'], []])
def test_an_answer_that_breaks_off_is_kept_as_failed(ending: list[bytes]) -> None:
    """A router ends it with an error when the instance has died. Other servers may just end it."""
    created = b'event: response.created\ndata: {"response":{"id":"r","error":null,"status":"in_progress"}}\n\n'
    pieces = [created, *ending]
    error = {"code": "server_error", "message": "the answer broke off"}
    kept = {"id": "r", "error": error, "status": "failed", "output": []}
    assert asyncio.run(passed_on(pieces, "r")) == (b"".join(pieces), 200, kept)


async def passed_on(pieces: list[bytes], response_id: str) -> tuple[bytes, int, Any]:
    """Return what a router sends of a stream of ``pieces``, and status and content of the response that it keeps."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for piece in (*pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    sent: list[bytes] = []
    keeper = open_responses(RouterOptions(worker=["http://127.0.0.1:1"]), is_router=True)
    request = await keeper.read({"headers": []}, b'{"input": "a"}', 1 << 20)
    await keeper.answer(request, app, {"headers": []}, None, send)  # type: ignore[arg-type]
    scope = {
        "type": "http",
        "path": f"/v1/responses/{response_id}",
        "headers": [],
        "query_string": b"",
        "path_params": {"id": response_id},
    }
    answer = await keeper.get(Request(scope))
    return b"".join(sent), answer.status_code, json.loads(bytes(answer.body)) if answer.status_code == 200 else None


def test_a_client_that_does_not_read_cannot_hold_up_a_cancel() -> None:
    created = b'event: response.created\ndata: {"response":{"id":"r","status":"in_progress"}}\n\n'
    reads = asyncio.Event()
    sent: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": created, "more_body": True})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()
            sent.append(message["body"])

    async def run() -> None:
        keeper = open_responses(RouterOptions(worker=["http://127.0.0.1:1"]), is_router=True)
        request = await keeper.read({"headers": []}, b'{"input": "a"}', 1 << 20)
        answering = keeper.answer(request, app, {"headers": []}, None, send)  # type: ignore[arg-type]
        task = asyncio.create_task(answering)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        scope = {
            "type": "http",
            "path": "/v1/responses/r",
            "headers": [],
            "query_string": b"",
            "path_params": {"id": "r"},
        }
        try:
            async with asyncio.timeout(limit(3)):
                cancelled = await keeper.cancel(Request(scope))
            kept = await keeper.get(Request(scope))
        finally:
            reads.set()
        await task
        assert (cancelled.status_code, json.loads(bytes(cancelled.body))["status"]) == (200, "cancelled")
        assert kept.body == cancelled.body
        assert task.cancelling() == 0
        assert b"response.incomplete" in b"".join(sent)

    asyncio.run(run())


@pytest.mark.parametrize(("nbytes", "is_large"), [(10, False), (LARGE_BYTES, True)])
def test_what_a_request_names_decides_where_it_is_read(
    nbytes: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def output(response: bytes) -> list[Any]:
        threads.append(threading.current_thread().name)
        return []

    monkeypatch.setattr(request_module, "output_of", output)
    store = ResponseStore(StoreLimits(1 << 24, 1 << 24), NoFiles())
    store.put(KeptResponse("", "r", b"{}", b"7" * nbytes))
    keeper = ResponseKeeper(store, is_router=True)
    raw = b'{"previous_response_id": "r", "input": "a"}'
    assert asyncio.run(keeper.read({"headers": []}, raw, 1 << 24)).keeps
    assert [name.startswith("large-bodies") for name in threads] == [is_large]


@both
def test_a_request_id_may_be_used_again(kind: str) -> None:
    async def check(served: Front) -> None:
        ids = []
        for text in ("a", "b"):
            body = {"input": text, **SHORT}
            ids.append((await served.client.post(PATH, json=body, headers={"x-request-id": "trace"})).json()["id"])
        assert ids[0] != ids[1]
        assert all(name.startswith("resp_trace-") for name in ids)
        await served.create("c", previous_response_id=ids[0])
        chat = served.engine.sent[-1].chat
        assert chat is not None
        assert chat.messages[0].content == "a"

    scene(check, kind)


@both
def test_a_conversation_has_the_limits_of_a_body(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_CONTAINERS", 9)

    async def check(served: Front) -> None:
        items = [{"role": "user", "content": "a"}] * 4
        first = await served.create(items)
        answer = await served.client.post(PATH, json={"input": items, "previous_response_id": first["id"]})
        assert (answer.status_code, "lists and objects" in answer.text) == (413, True)

    scene(check, kind)


@both
def test_a_response_that_there_is_no_room_for_is_not_kept(kind: str) -> None:
    async def check(served: Front) -> None:
        first = await served.create("a" * 20_000)
        assert first["store"] is False
        answer = await served.client.post(PATH, json={"input": "b", "previous_response_id": first["id"]})
        assert (answer.status_code, "--responses-quota" in answer.text) == (400, True)
        last = await served.create("a")
        assert (last["store"], await served.status(last["id"])) == (True, 200)

    scene(check, kind, responses_quota=0.01)


@both
def test_bodies_that_wait_to_be_read_have_a_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones wait for each other, and must not fill the memory meanwhile."""
    monkeypatch.setattr(app_module, "MAX_UPLOADS", 1)
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 8000)
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def read(*_: Any) -> ResponseRequest:
        begun.set()
        await goes_on.wait()
        raise NotKept("input", "no")

    async def check(served: Front) -> None:
        monkeypatch.setattr(ResponseKeeper, "read", read)
        first = asyncio.create_task(served.client.post(PATH, json={"input": "a" * 5000}))
        await begun.wait()
        second = await served.client.post(PATH, json={"input": "a" * 5000})
        goes_on.set()
        assert (second.status_code, (await first).status_code) == (503, 400)

    scene(check, kind, **({"max_body_bytes": 8000, "max_held_body_bytes": 8000} if kind == "router" else {}))


@both
def test_nothing_is_kept_if_the_options_say_so(kind: str) -> None:
    async def check(served: Front) -> None:
        response = await served.create("a")
        assert response["store"] is False
        assert await served.status(response["id"]) == 404
        assert (await served.instance.get(f"{PATH}/{response['id']}")).status_code == 404

    scene(check, kind, responses_size=0.0)


@both
def test_a_folder_survives_the_server(kind: str, tmp_path: Path) -> None:
    ids: list[str] = []

    async def first(served: Front) -> None:
        ids.append((await served.create("a"))["id"])

    async def second(served: Front) -> None:
        response = await served.create("b", previous_response_id=ids[0], stream=True)
        assert response["previous_response_id"] == ids[0]
        chat = served.engine.sent[0].chat
        assert chat is not None
        assert [message.content for message in chat.messages] == ["a", SAID, "b"]

    scene(first, kind, responses_dir=str(tmp_path))
    scene(second, kind, responses_dir=str(tmp_path))
