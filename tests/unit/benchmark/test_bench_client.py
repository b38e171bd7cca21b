"""The load generator's client against scripted servers. Times are exact: both share a clock that the script sets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from pdserve.benchmark import http_client
from pdserve.benchmark.backends import make_backend
from pdserve.benchmark.errors import RequestError, ServerError
from pdserve.benchmark.http_client import HttpClient
from pdserve.benchmark.metrics import Slo, report_run
from pdserve.benchmark.options import BenchOptions
from pdserve.benchmark.prompts import RequestSpec
from pdserve.benchmark.record import RequestRecord
from pdserve.benchmark.runner import LoadRunner, RunResult
from pdserve.benchmark.workload import Load, LoadGroup, Workload

SPEC = RequestSpec(np.arange(1000, 1005, dtype=np.int32), 3)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Answer:
    """One request at the server, and the means to answer it."""

    def __init__(self, server: Scripted, writer: asyncio.StreamWriter, path: str, body: dict) -> None:
        self.server, self.writer, self.path, self.body = server, writer, path, body

    async def send(self, data: bytes, after: float = 0.0) -> None:
        """Let time pass, send, and wait until the client has the bytes: then it has read the clock."""
        self.server.now += after
        reads = self.server.reads
        self.writer.write(data)
        while self.server.reads == reads and not self.writer.is_closing():
            await asyncio.sleep(0)

    async def events(self, *events: object, after: float = 0.0) -> None:
        """Server-sent events in one HTTP chunk."""
        data = b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)
        await self.send(b"%x\r\n%s\r\n" % (len(data), data), after)

    async def end(self, *events: object, after: float = 0.0) -> None:
        """Send the last events, [DONE] and the end of the body."""
        await self.events(*events, b"[DONE]", after=after)
        await self.send(b"0\r\n\r\n")

    async def reply(self, status: int, content: object) -> None:
        """Send a plain answer."""
        data = json.dumps(content).encode()
        await self.send(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))


Script = Callable[[Answer], Awaitable[None]]


class Scripted:
    """An HTTP server with scripted answers, and the clock of the client that talks to it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.now = 100.0
        self.reads = 0
        self.answers: list[Answer] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.under_way = self.most_under_way = 0

    def clock(self) -> float:
        self.reads += 1
        return self.now

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = Answer(self, writer, head.split(" ")[1], json.loads(body or b"{}"))
                self.answers.append(answer)
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
                await self.script(answer)
                self.under_way -= 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Scripted, HttpClient]]:
    scripted = Scripted(script)
    server = await asyncio.start_server(scripted.connection, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", clock=scripted.clock)
    async with server:
        try:
            yield scripted, client
        finally:
            client.close()
            for writer in scripted.writers:
                writer.transport.abort()
            # The transports close in the next turns of the loop.
            for _ in range(3):
                await asyncio.sleep(0)


def group(specs: list[RequestSpec], arrivals: list[float] | None = None, concurrency: int | None = 1) -> LoadGroup:
    return LoadGroup("all", iter(specs), None if arrivals is None else iter(arrivals), concurrency, len(specs))


def measure(
    script: Script,
    backend: str = "pdserve",
    groups: list[LoadGroup] | None = None,
    timeout: float = 30.0,
    **limits: float,
) -> tuple[Scripted, RunResult]:
    """Run a load (one request, unless given) against the script."""

    async def run() -> tuple[Scripted, RunResult]:
        async with serving(script) as (scripted, client):
            api = make_backend(BenchOptions(backend=backend, model="m"))
            await api.prepare(client)
            runner = LoadRunner(client, api, timeout, limits.get("drain", 30.0), lambda record: None)
            workload = Workload("test", Load(), groups or [group([SPEC])], [], limits.get("duration", math.inf))
            return scripted, await runner.run(workload)

    return asyncio.run(run())


def only_record(script: Script, backend: str = "pdserve", **more: float) -> RequestRecord:
    (record,) = measure(script, backend, **more)[1].records
    return record


def generated(tokens: int, ended: str | None = None, text: str = "x") -> dict:
    finish = {"type": ended, "message": "no memory"} if ended else None
    meta = {"prompt_tokens": 5, "completion_tokens": tokens, "cached_tokens": 2, "finish_reason": finish}
    return {"text": text, "output_ids": list(range(tokens)), "meta_info": meta}


async def generate_three(answer: Answer) -> None:
    """Answer with a token after 150 ms, then two in one chunk 30 ms later, and end the stream 5 ms after that."""
    await answer.send(STREAM, after=0.1)
    await answer.events(generated(1, text='"completion_tokens":77'), after=0.05)
    await answer.events(generated(3, "length"), after=0.03)
    await answer.end(after=0.005)


def test_times_and_counts_of_a_generate_stream() -> None:
    scripted, result = measure(generate_three)
    (record,) = result.records
    assert record.error is None
    assert record.ttft == pytest.approx(0.150)
    assert record.itls == pytest.approx([0.030])
    assert record.tpot == pytest.approx(0.015)
    assert record.e2e == pytest.approx(0.180)
    assert record.ended == pytest.approx(0.185)
    assert list(record.chunk_tokens) == [1, 2]
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 3, 2)
    sent = scripted.answers[0].body
    assert sent["input_ids"] == [1000, 1001, 1002, 1003, 1004]
    assert sent["sampling_params"] == {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    report = report_run(result, Slo(ttft=150.1, itl=30.1))
    assert report.total.ttft.median == pytest.approx(150)
    assert report.total.output_throughput == pytest.approx(3 / 0.185)
    assert report.total.goodput == pytest.approx(1 / 0.185)
    assert report_run(result, Slo(itl=29.9)).total.goodput == 0


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_cut_anywhere_are_put_together(end: str) -> None:
    async def script(answer: Answer) -> None:
        await answer.send(STREAM)
        events = [json.dumps(generated(1)), json.dumps(generated(3, "length")), "[DONE]"]
        lines = [": ping", "", "event: x"] + [line for event in events for line in (f"data: {event}", "")]
        for byte in end.join([*lines, ""]).encode():
            await answer.send(b"1\r\n%c\r\n" % byte, after=0.001)
        await answer.send(b"0\r\n\r\n")

    record = only_record(script)
    assert record.error is None
    assert list(record.chunk_tokens) == [1, 2]
    first = len(end.join([": ping", "", "event: x", "data: " + json.dumps(generated(1)), "", ""]))
    assert record.ttft == pytest.approx(first / 1000)


def completed(text: str = "a", ended: str | None = None, **more: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": ended}], **more}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


@pytest.mark.parametrize(("backend", "chunks"), [("vllm", [1, 1, 1]), ("openai", [1, 1])])
def test_a_completions_stream(backend: str, chunks: list[int]) -> None:
    """vLLM's last token may have no text yet; elsewhere a last event without text is only the finish reason."""

    async def script(answer: Answer) -> None:
        assert answer.path == "/v1/completions"
        await answer.send(STREAM)
        await answer.events(completed(), after=0.2)
        await answer.events(completed(""), after=0.01)
        await answer.events(completed("", "length"), after=0.5)
        await answer.end(USAGE)

    scripted, result = measure(script, backend)
    (record,) = result.records
    assert (record.error, list(record.chunk_tokens)) == (None, chunks)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 3, 4)
    assert record.itls[0] == pytest.approx(0.01)
    body = scripted.answers[0].body
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", SPEC.prompt.tolist(), 3)
    assert (body["ignore_eos"], body["stream_options"]) == (True, {"include_usage": True})


def test_usage_in_every_chunk_counts_its_tokens() -> None:
    async def script(answer: Answer) -> None:
        await answer.send(STREAM)
        await answer.events(completed(usage={"completion_tokens": 1}))
        await answer.events(completed(usage={"completion_tokens": 4}), after=0.1)
        await answer.end(completed("", "length"), USAGE)

    assert list(only_record(script, "openai").chunk_tokens) == [1, 3]


def test_a_llama_cpp_stream() -> None:
    async def script(answer: Answer) -> None:
        assert answer.path == "/completion"
        await answer.send(STREAM)
        await answer.events({"content": "a", "stop": False, "tokens_predicted": 1}, after=0.1)
        await answer.events({"content": "b", "stop": False, "tokens_predicted": 3}, after=0.02)
        last = {"content": "", "stop": True, "tokens_predicted": 3, "tokens_evaluated": 5, "timings": {"cache_n": 1}}
        await answer.events(last, after=0.3)
        await answer.send(b"0\r\n\r\n")

    scripted, result = measure(script, "llamacpp")
    (record,) = result.records
    assert (record.error, list(record.chunk_tokens), record.cached_tokens) == (None, [1, 2], 1)
    assert record.e2e == pytest.approx(0.12)
    assert scripted.answers[0].body["n_predict"] == 3


async def break_off(answer: Answer) -> None:
    await answer.send(STREAM)
    await answer.events(generated(1))
    answer.writer.transport.abort()


async def hang_up(answer: Answer) -> None:
    answer.writer.close()


async def refuse(answer: Answer) -> None:
    await answer.reply(429, {"error": {"message": "queue is full"}})


async def fail_in_stream(answer: Answer) -> None:
    await answer.send(STREAM)
    await answer.end(generated(1), {"error": {"message": "prefill died"}})


async def abort(answer: Answer) -> None:
    await answer.send(STREAM)
    await answer.end(generated(1, "abort"))


async def say_nothing(answer: Answer) -> None:
    await answer.send(STREAM)
    await answer.end()


async def forget_done(answer: Answer) -> None:
    await answer.send(STREAM)
    await answer.events(generated(3, "length"))
    await answer.send(b"0\r\n\r\n")


async def babble(answer: Answer) -> None:
    await answer.send(b"SSH-2.0-x\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (break_off, "closed the connection within"),
        (hang_up, "closed the connection before"),
        (refuse, "HTTP 429: .*queue is full"),
        (fail_in_stream, "prefill died"),
        (abort, "ended by abort: no memory"),
        (say_nothing, "no token"),
        (forget_done, r"without \[DONE\]"),
        (babble, "not HTTP"),
    ],
)
def test_a_bad_answer_is_a_failed_request(script: Script, says: str) -> None:
    _, result = measure(script)
    report = report_run(result, Slo(ttft=1000)).total
    assert (report.completed, report.failed, report.goodput, report.ttft) == (0, 1, 0, None)
    ((error, count),) = report.errors.items()
    assert count == 1
    assert re.search(says, error)


def test_a_failure_leaves_the_other_requests_alone() -> None:
    async def script(answer: Answer) -> None:
        await (refuse if len(answer.server.answers) == 2 else generate_three)(answer)

    scripted, result = measure(script, groups=[group([SPEC] * 4)])
    assert [record.error is None for record in result.records] == [True, False, True, True]
    assert scripted.connections == 1


async def never(answer: Answer) -> None:
    await asyncio.Event().wait()


def test_a_request_that_takes_too_long_has_failed() -> None:
    assert "not complete after 0.02 s" in str(only_record(never, timeout=0.02).error)


def test_what_is_under_way_when_a_scenario_ends_has_time_to_finish_and_then_failed() -> None:
    record = only_record(never, duration=0.01, drain=0.01)
    assert record.error == "not complete when the run ended"


@pytest.mark.parametrize("was_idle_for_long", [True, False])
def test_a_connection_that_the_server_dropped_while_idle_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, was_idle_for_long: bool
) -> None:
    monkeypatch.setattr(http_client, "RESEND_IDLE_SECONDS", -1.0 if was_idle_for_long else 3600.0)

    async def script(answer: Answer) -> None:
        # The second request reaches the server on the kept connection, which it closes without a word.
        await (hang_up if len(answer.server.answers) == 2 else generate_three)(answer)

    scripted, result = measure(script, groups=[group([SPEC] * 2)])
    # One that was just in use was lost to a crash, which the same request might cause again.
    assert [record.error is None for record in result.records] == [True, was_idle_for_long]
    assert len(scripted.answers) == 2 + was_idle_for_long


def test_an_answer_without_length_or_chunks_ends_with_its_connection() -> None:
    async def script(answer: Answer) -> None:
        data = f"data: {json.dumps(generated(3, 'length'))}\n\ndata: [DONE]\n\n"
        await answer.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + data.encode())
        answer.writer.close()

    assert only_record(script).error is None


def test_no_server_listens() -> None:
    async def ask() -> None:
        async with serving(never) as (_, client):
            pass
        await client.get_json("/v1/models")

    with pytest.raises(RequestError, match="no connection to"):
        asyncio.run(ask())


def test_the_model_is_asked_for_once() -> None:
    async def ask(content: object) -> bytes:
        async with serving(lambda answer: answer.reply(200, content)) as (_, client):
            backend = make_backend(BenchOptions(backend="vllm"))
            await backend.prepare(client)
            return backend.body(SPEC)

    assert json.loads(asyncio.run(ask({"data": [{"id": "served"}]})))["model"] == "served"
    with pytest.raises(ServerError, match="give --model"):
        asyncio.run(ask({"data": []}))


def test_concurrency_is_kept() -> None:
    async def script(answer: Answer) -> None:
        server = answer.server
        while len(server.answers) < 7 and server.under_way < 3:
            await asyncio.sleep(0)
        await generate_three(answer)

    # With arrivals it is the most under way; without, the number of clients.
    for arrivals in (None, [0.0] * 7):
        scripted, result = measure(script, groups=[group([SPEC] * 7, arrivals, concurrency=3)])
        assert (scripted.most_under_way, scripted.connections) == (3, 3)
        assert len(result.records) == 7


def test_arrivals_are_kept_whatever_the_server_does() -> None:
    """All of an open loop's requests are under way together when the server answers none of them before the last."""

    async def script(answer: Answer) -> None:
        while len(answer.server.answers) < 5:
            await asyncio.sleep(0)
        await generate_three(answer)

    scripted, result = measure(script, groups=[group([SPEC] * 5, [0.0] * 5, concurrency=None)])
    assert scripted.most_under_way == 5
    assert report_run(result, Slo()).total.peak_concurrency == 5


def test_warm_up_is_not_measured_and_its_failure_ends_the_benchmark() -> None:
    async def run(script: Script) -> int:
        async with serving(script) as (scripted, client):
            runner = LoadRunner(client, make_backend(BenchOptions()), 30, 30, lambda record: None)
            workload = Workload("test", Load(), [group([SPEC])], [SPEC] * 3)
            await runner.warm_up(workload)
            result = await runner.run(workload)
            assert len(scripted.answers) == 4
            return len(result.records)

    assert asyncio.run(run(generate_three)) == 1
    with pytest.raises(ServerError, match="queue is full"):
        asyncio.run(run(refuse))
