"""Reads many endless streams as cheaply as Python can, and asks for a first token now and then: one epoll loop."""

from __future__ import annotations

import itertools
import re
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from pdserve.benchmark.errors import ServerError

from ..servers.raw_streams import STATUS_OK, request_bytes
from .token_source import MANY, MODEL, PATH

BUFFER_BYTES = 1 << 18
BATCH = 32
"""Sockets that are looked at before the probe's is again: it may wait that long."""
READY_SECONDS = 30.0
PROBE_GAP_SECONDS = 0.005
SENT_AT = re.compile(rb'"text":\s*" (\d{10}\.\d{6})"')
EVENT_END = b"\n\n"


def ask(tokens: int) -> bytes:
    """Return the bytes of an HTTP request for a stream of ``tokens`` tokens."""
    return request_bytes(PATH, {"model": MODEL, "prompt": "x", "max_tokens": tokens, "stream": True})


class Seen(NamedTuple):
    """Events that arrived in ``seconds``. All times are in seconds."""

    seconds: float
    delays: list[float]
    """Delays of all events since their sending."""
    probes: dict[int, list[float]]
    """Times to the first token of the probes, by the port that they went to."""


class RelayClient:
    """Endless streams from the server at ``port`` of the loopback address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._buffer = bytearray(BUFFER_BYTES)
        self._probe: socket.socket | None = None
        self._probe_sent = 0.0

    @contextmanager
    def streaming(self, count: int) -> Iterator[None]:
        """Keep ``count`` streams open within the ``with`` block, which begins when each has had a token.

        Raises ``ServerError`` if they do not begin within ``READY_SECONDS``.
        """
        try:
            for _ in range(count):
                self._open(self._port, ask(MANY))
            deadline = time.perf_counter() + READY_SECONDS
            waiting = set(self._sockets)
            while waiting:
                if time.perf_counter() > deadline:
                    raise ServerError(f"{len(waiting)} of {count} streams did not begin in {READY_SECONDS:.0f} s")
                for number, _ in self._epoll.poll(1.0, BATCH):
                    if self._read(number):
                        waiting.discard(number)
            yield
        finally:
            self._end_streams()

    def watch(self, seconds: float, probed: Sequence[int] = ()) -> Seen:
        """Read the open streams for ``seconds``, and return their events' delays.

        Meanwhile ask the ``probed`` ports in turn for one token, on a new connection each, to measure TTFT.
        """
        begin = now = next_probe = time.perf_counter()
        delays, probes = list[float](), {port: list[float]() for port in probed}
        turns = itertools.cycle(probed)
        port = 0
        while now < begin + seconds:
            if probed and self._probe is None and now >= next_probe:
                port = next(turns)
                self._send_probe(port)
            for number, _ in self._epoll.poll(PROBE_GAP_SECONDS if probed else 0.1, BATCH):
                if self._probe is not None and number == self._probe.fileno():
                    if (ttft := self._read_probe()) is not None:
                        probes[port].append(ttft)
                        next_probe = time.perf_counter() + PROBE_GAP_SECONDS
                    continue
                sent = self._read(number)
                arrived = time.perf_counter()
                delays.extend(arrived - at for at in sent)
            now = time.perf_counter()
        self._end_probe()
        return Seen(now - begin, delays, probes)

    def close(self) -> None:
        """Close all streams and the epoll object."""
        self._end_streams()
        self._epoll.close()

    def _end_streams(self) -> None:
        for stream in self._sockets.values():
            stream.close()
        self._sockets.clear()
        self._rests.clear()
        self._probe = None

    def _open(self, port: int, request: bytes) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", port))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(request)
        stream.setblocking(False)
        self._sockets[stream.fileno()] = stream
        self._rests[stream.fileno()] = b""
        self._epoll.register(stream.fileno(), select.EPOLLIN)
        return stream

    def _read(self, number: int) -> list[float]:
        """Read from a stream; return when its newly arrived events were sent, in seconds of the source's clock.

        Raises ``ServerError`` if the stream ends or is an error.
        """
        size = self._sockets[number].recv_into(self._buffer)
        data = self._rests[number] + self._buffer[:size]
        if not size or (data.startswith(b"HTTP/") and not data.startswith(STATUS_OK)):
            raise ServerError(f"a stream ended: {bytes(data[-200:]).decode(errors='replace')!r}")
        end = data.rfind(EVENT_END) + 1
        self._rests[number] = bytes(data[end:])
        return [float(at) for at in SENT_AT.findall(data, 0, end)]

    def _send_probe(self, port: int) -> None:
        self._probe_sent = time.perf_counter()
        self._probe = self._open(port, ask(1))

    def _read_probe(self) -> float | None:
        """Return the seconds from the probe's request to its first token, and close it; None if no token has come."""
        assert self._probe is not None
        if not self._read(self._probe.fileno()):
            return None
        ttft = time.perf_counter() - self._probe_sent
        self._end_probe()
        return ttft

    def _end_probe(self) -> None:
        if self._probe is not None:
            number = self._probe.fileno()
            self._epoll.unregister(number)
            self._sockets.pop(number).close()
            del self._rests[number]
            self._probe = None
