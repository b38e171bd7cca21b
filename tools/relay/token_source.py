"""An instance that costs next to nothing, to measure the router between it and its clients.

``python -P -m tools.relay.token_source PARENT_PID`` prints its port, and dies with its parent. All streams get a
token at the same moment, as in one instance. Each token is an event of its own, with the time of its sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

import orjson
import uvloop

from pdserve.runtime.child import die_with_parent
from pdserve.runtime.python import python_command

from ..environment import environment

MODEL = "relay"
PATH = "/v1/completions"
PACE = "/pace/"
MANY = 1 << 30
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1,"model":"relay","choices":[{"index":0,'
    b'"text":" %017.6f","logprobs":null,"finish_reason":null}]}\n\n'
)
"""As long as one of ``/v1/completions`` is. Its text: when it was sent, by ``time.perf_counter``, which all share."""
DONE = b"data: [DONE]\n\n"
ABOUT = {"status": "ready", "model_path": MODEL, "object": "list", "data": [{"id": MODEL, "object": "model"}]}
"""What is answered to any question: enough for a router to take this for an instance."""


def chunk(data: bytes) -> bytes:
    """Format ``data`` as a chunk of an HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Streams:
    """All answers under way. A token goes to each every ``interval`` seconds, to those that can take it."""

    def __init__(self) -> None:
        self.interval = 0.02
        self._left: dict[Connection, int] = {}
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._loop.call_soon(self._step)

    def add(self, connection: Connection, tokens: int) -> None:
        """Begin an answer of ``tokens`` tokens on a connection, and send the first token at once."""
        self._left[connection] = tokens
        self._give(connection, chunk(EVENT % time.perf_counter()))

    def drop(self, connection: Connection) -> None:
        """Stop sending to a connection that is closed."""
        self._left.pop(connection, None)

    def _step(self) -> None:
        event = chunk(EVENT % time.perf_counter())
        for connection in list(self._left):
            if connection.takes:
                self._give(connection, event)
        # Late steps are left out rather than made up for.
        self._due = max(self._due + self.interval, self._loop.time())
        self._loop.call_at(self._due, self._step)

    def _give(self, connection: Connection, event: bytes) -> None:
        self._left[connection] -= 1
        if self._left[connection]:
            connection.write(event)
        else:
            del self._left[connection]
            connection.write(event + chunk(DONE) + chunk(b""))


class Connection(asyncio.Protocol):
    """One connection, one request at a time. ``takes``: whether it isn't behind."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._received = b""
        self.takes = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports have these methods without being subclasses.
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.drop(self)

    def pause_writing(self) -> None:
        self.takes = False

    def resume_writing(self) -> None:
        self.takes = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        _, announced, size = head.lower().partition(b"content-length:")
        length = int(size.partition(b"\r\n")[0]) if announced else 0
        if head.startswith(b"PRI "):
            self._transport.close()  # a client that tries HTTP/2
        elif end and len(body) >= length:
            self._received = body[length:]
            self._answer(head.split(b" ")[1].decode(), body[:length])

    def _answer(self, path: str, body: bytes) -> None:
        if path == PATH:
            self.write(STREAM_HEAD)
            self._streams.add(self, orjson.loads(body)["max_tokens"])
            return
        if path.startswith(PACE):
            self._streams.interval = float(path.removeprefix(PACE))
        answer = orjson.dumps(ABOUT)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.write(head % len(answer) + answer)


class TokenSource:
    """Handle of a running source, to measure with it."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def pace(self, interval: float) -> None:
        """Set the time between two tokens of each stream to ``interval`` seconds, by a request to the source."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", f"{PACE}{interval!r}")
            connection.getresponse().read()


@contextlib.contextmanager
def token_source() -> Iterator[TokenSource]:
    """Run a token source as a process within the ``with`` block, and yield a handle to it."""
    argv = python_command("-m", "tools.relay.token_source", str(os.getpid()))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        try:
            yield TokenSource(int(process.stdout.readline()), process.pid)
        finally:
            process.terminate()


async def serve() -> None:
    """Serve streams of tokens on a free port, which is printed, until the process is killed."""
    streams = Streams()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(streams), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    uvloop.run(serve())
