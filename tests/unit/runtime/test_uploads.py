"""Bodies that arrive at once have a limit together, and the largest one pays for it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from pdserve.runtime.web import body as body_module
from pdserve.runtime.web.body import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    STEP,
    BodyTooLarge,
    TooManyValues,
    UploadDropped,
    Uploads,
)


class Client:
    """Sends a body in parts, each when it is told to."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def send(self, size: int, *, last: bool = False) -> None:
        self.parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": not last})

    def read(self, uploads: Uploads, limit: int = 100) -> asyncio.Task[bytes]:
        request = Request({"type": "http", "headers": []}, self.parts.get)
        return asyncio.create_task(uploads.read(request, limit))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_whole_body_comes_as_it_was_and_leaves_nothing_behind() -> None:
    async def run() -> None:
        uploads, client = Uploads(100), Client()
        for _ in range(5):
            body = client.read(uploads)
            client.send(60)
            client.send(30, last=True)
            assert await body == b"x" * 90
        assert uploads.held == 0

    asyncio.run(run())


def test_the_largest_is_ended_and_the_others_go_on() -> None:
    async def run() -> None:
        uploads = Uploads(100)
        small, large, late = Client(), Client(), Client()
        bodies = [client.read(uploads) for client in (small, large, late)]
        small.send(20)
        large.send(70)
        await turns()
        assert uploads.held == 90
        late.send(30)
        await turns()
        with pytest.raises(UploadDropped, match="again later"):
            await bodies[1]
        assert uploads.held == 50
        for client in (small, late):
            client.send(1, last=True)
        assert [len(await body) for body in (bodies[0], bodies[2])] == [21, 31]
        assert uploads.held == 0

    asyncio.run(run())


def test_one_that_is_told_to_go_is_told_once_and_costs_no_other_its_place() -> None:
    async def run() -> None:
        uploads = Uploads(100)
        clients = [Client() for _ in range(3)]
        bodies = [client.read(uploads) for client in clients]
        await turns()
        # All in one turn of the loop: the dropped one still holds its bytes when the last ones come.
        clients[0].send(90)
        clients[1].send(20)
        clients[2].send(20)
        await turns()
        with pytest.raises(UploadDropped):
            await bodies[0]
        for client in clients[1:]:
            client.send(1, last=True)
        assert [len(await body) for body in bodies[1:]] == [21, 21]
        assert uploads.held == 0

    asyncio.run(run())


def test_a_body_over_its_own_limit_and_a_client_that_leaves_give_everything_back() -> None:
    async def run() -> None:
        uploads = Uploads(1000)
        client = Client()
        body = client.read(uploads, 10)
        client.send(11)
        with pytest.raises(BodyTooLarge):
            await body
        body = client.read(uploads)
        client.send(50)
        await turns()
        body.cancel()
        with pytest.raises(asyncio.CancelledError):
            await body
        assert uploads.held == 0

    asyncio.run(run())


def test_the_heap_is_trimmed_behind_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "TRIM_BYTES", 100)
    held: list[int] = []

    async def run() -> None:
        uploads = Uploads(1000)
        monkeypatch.setattr(body_module, "trim", lambda: held.append(uploads.held))
        for size, trims in ((99, 0), (1, 1), (60, 1), (60, 2), (250, 3)):
            client = Client()
            body = client.read(uploads, 1000)
            client.send(size)
            await turns()
            body.cancel()
            await turns()
            assert held == [0] * trims

    asyncio.run(run())


def whole(body: bytes) -> bytes:
    """Return ``body`` as it is read, or raise the reason why it is not."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return parts.pop()

    return asyncio.run(Uploads(2**30).read(Request({"type": "http", "headers": []}, receive), 2**30))


def test_more_values_than_a_parser_should_be_given_at_once_are_refused() -> None:
    most = b"[" + b"1," * MAX_VALUES + b"1]"
    quoting = b'{"text":"' + b'\\"' * (4 * MAX_STRINGS) + b'"}'
    nested = b"[" + b"{}," * (MAX_CONTAINERS - 1) + b"1]"
    for good in (most, quoting, nested):
        assert whole(good) == good
    for much in (
        b"[" + b"1," * MAX_VALUES + b"1,1]",
        b"[" * (MAX_CONTAINERS + 1),
        b"[" + b"{}," * MAX_CONTAINERS + b"1]",
        b"{" + b'"name":1,' * MAX_STRINGS + b'"a":1}',
    ):
        with pytest.raises(TooManyValues, match="fewer prompts"):
            whole(much)


@pytest.mark.parametrize("step", [7, 8, 64])
def test_brackets_in_texts_do_not_count(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(body_module, "MAX_CONTAINERS", 9)
    monkeypatch.setattr(body_module, "STEP", step)
    # Texts that end in a backslash, hold quotes, or nothing but brackets.
    texts = ["{[" * 20, '"[' * 20, "\\", "[\\", '\\"{', "\\" * 20 + "[" * 20, ""]
    for count, good in ((5, True), (6, False)):
        # The body itself and its list open two of them, and each object two.
        raw = orjson.dumps({"text": texts, "rest": [{"a": ["x["]}] * ((count + 1) // 2) + [[]] * (1 - count % 2)})
        opened = 3 + 2 * ((count + 1) // 2) + 1 - count % 2
        assert (opened <= 9) is good
        if good:
            assert whole(raw) == raw
        else:
            with pytest.raises(TooManyValues):
                whole(raw)


@pytest.mark.parametrize("filler", [b"[", b"\\"])
def test_counting_leaves_turns_to_others(filler: bytes) -> None:
    async def run() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        raw = b'{"text":"' + b"[" * (MAX_CONTAINERS + 1) + filler * (8 * STEP) + b'"}'
        other = asyncio.create_task(others())
        assert not await body_module._has_too_many(raw, MAX_VALUES)
        other.cancel()
        assert turns >= 16

    asyncio.run(run())


def test_complete_bodies_that_wait_for_a_parser_have_a_limit() -> None:
    uploads = Uploads(100)
    with uploads.wait(300), pytest.raises(UploadDropped, match="later"), uploads.wait(1):
        pass
    with uploads.wait(60), uploads.wait(40), pytest.raises(UploadDropped), uploads.wait(1):
        pass
    assert uploads.waiting == 0
