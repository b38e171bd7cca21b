"""``python -P -m tools.client_cost``: CPU time that a client takes for each streamed chunk.

Eight streams of a chunk every 2 ms come from another process; only this process's CPU time counts. Compared are the
load generator and the same loop on httpx and, where it is installed, aiohttp, all on the same event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import orjson
import uvloop

from pdserve.benchmark.backends import make_backend
from pdserve.benchmark.http_client import HttpClient
from pdserve.benchmark.options import BenchOptions
from pdserve.benchmark.prompts import RequestSpec
from pdserve.benchmark.runner import LoadRunner
from pdserve.benchmark.workload import Load, LoadGroup, Workload
from pdserve.runtime.python import python_command

from .environment import environment

STREAMS = 8
CHUNKS = 1000
GAP_SECONDS = 0.002
SERVE = "serve"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHOICE = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
EVENT = {"id": "cmpl-0123456789", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE]}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD)
    for i in range(CHUNKS):
        choice = {**CHOICE, "finish_reason": "length" if i == CHUNKS - 1 else None}
        event = b"data: " + orjson.dumps({**EVENT, "choices": [choice]}) + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await asyncio.sleep(GAP_SECONDS)
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _serve() -> None:
    """Start a server of streamed answers and print its port. Serve until standard input ends.

    So the server ends with the process that started it, however that ends.
    """
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


async def _ours(url: str) -> int:
    client = HttpClient(url)
    backend = make_backend(BenchOptions(backend="openai", model="m"))
    await backend.prepare(client)
    runner = LoadRunner(client, backend, 60, 60, lambda record: None)
    spec = RequestSpec(np.arange(64, dtype=np.int32), CHUNKS)
    group = LoadGroup("all", iter([spec] * STREAMS), None, STREAMS)
    result = await runner.run(Workload("cost", Load(), [group], []))
    return sum(len(record.chunk_times) for record in result.records)


def _stamp(times: list[float], line: bytes | str) -> None:
    """Parse one line of an event stream, and add the current time to ``times`` if it is a chunk with choices."""
    text = line.removeprefix(b"data: ") if isinstance(line, bytes) else line.removeprefix("data: ")
    if text.strip() not in (b"", b"[DONE]", "", "[DONE]") and orjson.loads(text)["choices"]:
        times.append(time.perf_counter())


async def _httpx(url: str) -> int:
    times: list[float] = []

    async def one(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json={"prompt": "x"}) as response:
            async for line in response.aiter_lines():
                _stamp(times, line)

    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        await asyncio.gather(*(one(client) for _ in range(STREAMS)))
    return len(times)


async def _aiohttp(url: str) -> int:
    # Any: it is no dependency, so there may be no types of it.
    aiohttp: Any = importlib.import_module("aiohttp")
    times: list[float] = []

    async def one(session: Any) -> None:
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
            async for line in response.content:
                _stamp(times, line)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session) for _ in range(STREAMS)))
    return len(times)


def measure(client: Callable[[str], Awaitable[int]], url: str) -> float:
    """Return the CPU seconds that ``client`` takes for each chunk that it receives from the server at ``url``."""
    begin = time.process_time()

    async def run() -> int:
        return await client(url)

    chunks: int = uvloop.run(run())
    assert chunks == STREAMS * CHUNKS, f"{chunks} chunks arrived"
    return (time.process_time() - begin) / chunks


def main() -> None:
    """Measure each client and print its CPU time per chunk; with the argument ``SERVE``, be the server instead."""
    if sys.argv[1:] == [SERVE]:
        uvloop.run(_serve())
        return
    clients: dict[str, Callable[[str], Awaitable[int]]] = {"pdserve bench": _ours, "httpx": _httpx}
    if importlib.util.find_spec("aiohttp") is not None:
        clients["aiohttp"] = _aiohttp
    command = python_command("-m", "tools.client_cost", SERVE)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for name, client in clients.items():
            print(f"{name:<14}{measure(client, url) * 1e6:7.1f} µs of CPU a chunk", flush=True)
        server.stdin.close()


if __name__ == "__main__":
    main()
