"""Reads many streamed answers at once and throws them away, as cheaply as Python can: one epoll loop over raw sockets.

Nothing is parsed. A connection serves one request, so that its end is the answer's end.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from pdserve.benchmark.errors import ServerError

BUFFER_BYTES = 1 << 20
SILENCE_SECONDS = 60.0
STATUS_OK = b"HTTP/1.1 200"
DONE = b"data: [DONE]"
TAIL_BYTES = 64


class StreamCost(NamedTuple):
    """``seconds`` and ``cpu_seconds`` from the first request to the last answer's end; ``reads`` of a socket."""

    seconds: float
    cpu_seconds: float
    reads: int
    bytes: int


def request_bytes(path: str, body: dict[str, object]) -> bytes:
    """Return the bytes of an HTTP POST of ``body`` as JSON, which asks the server to close the connection."""
    content = orjson.dumps(body)
    headers = (
        f"host: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(content)}"
    )
    return f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content


class RawStreams:
    """Keeps ``at_once`` requests under way on one server. For one ``run``."""

    def __init__(self, port: int, requests: Iterator[bytes], at_once: int) -> None:
        self._port = port
        self._requests = requests
        self._at_once = at_once
        self._buffer = bytearray(BUFFER_BYTES)
        self._epoll = select.epoll()
        self._streams: dict[int, socket.socket] = {}
        self._unanswered: set[int] = set()
        self._tails: dict[int, bytes] = {}

    def run(self, seconds: float) -> StreamCost:
        """Keep requests running for ``seconds``: send a new one when one has ended. Return when the last has ended.

        Raises ``ServerError`` if an answer is not a whole stream.
        """
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            reads, received = self._read_all(begin + seconds)
        finally:
            for stream in self._streams.values():
                stream.close()
            self._epoll.close()
        return StreamCost(time.perf_counter() - begin, time.process_time() - cpu, reads, received)

    def _read_all(self, until: float) -> tuple[int, int]:
        """Read all streams, and open new ones until the time ``until``. Return the number of reads and of bytes.

        Raises ``ServerError`` if all streams are silent for ``SILENCE_SECONDS``.
        """
        reads = received = 0
        for _ in range(self._at_once):
            self._open()
        while self._streams:
            ready = self._epoll.poll(SILENCE_SECONDS)
            if not ready:
                raise ServerError(f"{len(self._streams)} streams have been silent for {SILENCE_SECONDS:.0f} s")
            for number, _ in ready:
                size = self._read(number)
                reads += 1
                received += size
                if not size and time.perf_counter() < until:
                    self._open()
        return reads, received

    def _open(self) -> None:
        stream = socket.create_connection(("127.0.0.1", self._port))
        stream.sendall(next(self._requests))
        stream.setblocking(False)
        self._streams[stream.fileno()] = stream
        self._unanswered.add(stream.fileno())
        self._epoll.register(stream.fileno(), select.EPOLLIN)

    def _read(self, number: int) -> int:
        """Read once from the stream of the socket ``number``; return the number of bytes, 0 at the answer's end.

        Raises ``ServerError`` if the answer is an error or broke off.
        """
        size = self._streams[number].recv_into(self._buffer)
        if size:
            if number in self._unanswered:
                self._check_status(number, bytes(self._buffer[:size]))
            # The last bytes may come alone, so what came before them counts too.
            end = self._buffer[max(0, size - TAIL_BYTES) : size]
            self._tails[number] = (self._tails.get(number, b"") + end)[-TAIL_BYTES:]
            return size
        self._epoll.unregister(number)
        self._streams.pop(number).close()
        if DONE not in self._tails.pop(number, b""):
            raise ServerError("an answer broke off")
        return 0

    def _check_status(self, number: int, answer: bytes) -> None:
        self._unanswered.remove(number)
        if not answer.startswith(STATUS_OK):
            raise ServerError(f"the server refused: {answer.decode(errors='replace')}")
