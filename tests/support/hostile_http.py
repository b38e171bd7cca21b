"""A seeded HTTP client that speaks badly: odd versions, broken framing, torn requests, and clients that vanish.

Each case uses a connection of its own. The caller checks after each that the server still serves good requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
RST = struct.pack("ii", 1, 0)
PATIENCE = 0.02
"""Seconds that a case waits for a server that owes it nothing."""
GENERATIONS = (
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
)
QUESTIONS = ("/livez", "/health", "/v1/models", "/v1/models/x", "/metrics", "/nowhere", "/livez/", "/openapi.json")


class Case(NamedTuple):
    """What is sent, in parts; ``owed``: how many answers the server has to complete for it."""

    name: str
    parts: Sequence[bytes]
    owed: int = 0
    then: str = "read"
    """``read``, ``half_close`` before reading, or ``reset`` without reading."""


def request(method: str, path: str, *headers: bytes, body: bytes | None = None, version: bytes = b"1.1") -> bytes:
    """Return the bytes of an ordinary request."""
    lines = [b"%b %b HTTP/%b" % (method.encode(), path.encode(), version), b"host: localhost", *headers]
    if body is not None:
        lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", body or b""])


@contextlib.contextmanager
def good_requests(port: int, seconds: float) -> Iterator[Callable[[], None]]:
    """Yield a function that asks for a token and fails unless it comes.

    Its connection stays open, except if the server ends it.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}})

    def ask() -> None:
        connection.request("POST", "/generate", body)
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (200, True)

    with contextlib.closing(connection):
        yield ask


class HostileClient:
    """Cases by chance, from ``seed``; ``run`` tries them on a server at ``port``. ``headers``: of good requests.

    Raises ``AssertionError`` for an answer of 500, for what is no HTTP, and for an answer that is due and does not come
    within ``seconds``.
    """

    def __init__(self, port: int, seed: int, seconds: float, headers: Sequence[bytes] = ()) -> None:
        self._port = port
        self._headers = headers
        self._rng = random.Random(seed)
        self._seconds = seconds
        self.statuses: Counter[int] = Counter()
        self.cases: Counter[str] = Counter()

    def run(self, count: int, check: Callable[[], None]) -> None:
        """Try ``count`` cases. ``check`` is called after each, and raises an exception if the server is broken."""
        makers = [
            *(self.http_1_0, self.pipelined, self.half_closed, self.split, self.huge_head, self.slow, self.bad_chunks),
            *(self.bad_length, self.reset, self.mutated, self.odd_head, self.expecting, self.upgrading, self.noise),
        ]
        for number in range(count):
            case = self._rng.choice(makers)()
            self.cases[case.name] += 1
            try:
                self._try(case)
                check()
            except Exception as e:
                raise AssertionError(f"case {number}, {case.name}: {e!r} after {case.parts!r:.600}") from e

    # --- the cases ---

    def good(self, version: bytes = b"1.1", *headers: bytes) -> bytes:
        """Return a valid request."""
        headers = (*self._headers, *headers)
        if self._rng.random() < 0.5:
            return request(self._rng.choice(("GET", "HEAD")), self._rng.choice(QUESTIONS), *headers, version=version)
        path, body = self._rng.choice(GENERATIONS)
        stream = {"stream": self._rng.random() < 0.5}
        return request("POST", path, *headers, body=json.dumps(body | stream).encode(), version=version)

    def http_1_0(self) -> Case:
        keep = [b"connection: keep-alive"] * (self._rng.random() < 0.5)
        return Case("HTTP/1.0", [self.good(b"1.0", *keep)], owed=1)

    def pipelined(self) -> Case:
        count = self._rng.randrange(2, 8)
        data = b"".join(self.good() for _ in range(count))
        return Case("pipelined", self._torn(data, self._rng.randrange(1, 4)), owed=count)

    def half_closed(self) -> Case:
        return Case("half-closed", [self.good()], then="half_close")

    def split(self) -> Case:
        return Case("split", self._torn(self.good(), self._rng.randrange(2, 30)), owed=1)

    def huge_head(self) -> Case:
        size = self._rng.choice((1 << 10, 60 << 10, 70 << 10, 300 << 10))
        kinds = (
            request("GET", "/livez", b"x: " + b"y" * size),
            request("GET", "/" + "x" * size),
            request("GET", "/livez", *[b"x%d: y" % i for i in range(size >> 6)]),
            request("GET", "/livez?" + "q" * size),
        )
        return Case("huge head", self._torn(self._rng.choice(kinds), self._rng.randrange(1, 5)))

    def slow(self) -> Case:
        data = self.good()
        return Case("slow", [data[: self._rng.randrange(len(data))]])

    def bad_chunks(self) -> Case:
        kinds = (
            b"ZZ\r\nx\r\n",
            b"-1\r\n",
            b"5\r\nab\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\nx",
            b"3\r\nabcX",
            b"\r\n\r\n",
        )
        kinds += (b"0\r\nx: y\r\n\r\n", b"1;" + b"e" * 70_000 + b"\r\nx\r\n0\r\n\r\n", b"2\nab\n0\n\n", b"0 \r\n\r\n")
        head = request("POST", self._rng.choice(GENERATIONS)[0], b"transfer-encoding: chunked")
        return Case("bad chunks", self._torn(head + self._rng.choice(kinds), self._rng.randrange(1, 4)))

    def bad_length(self) -> Case:
        kinds = (b"-1", b"1e3", b"0x10", b"99999999999999999999", b"5, 5", b"", b" ", b"+5", b"4294967297", b"9" * 400)
        lines = [b"content-length: " + self._rng.choice(kinds) for _ in range(self._rng.randrange(1, 3))]
        lines += [b"transfer-encoding: chunked"] * (self._rng.random() < 0.3)
        return Case("bad length", [request("POST", self._rng.choice(GENERATIONS)[0], *lines) + b"hello"])

    def reset(self) -> Case:
        data = self.good()
        return Case("reset", [data[: self._rng.randrange(1, len(data) + 1)]], then="reset")

    def mutated(self) -> Case:
        data = bytearray(self.good())
        for _ in range(self._rng.randrange(1, 6)):
            at, kind = self._rng.randrange(len(data)), self._rng.randrange(3)
            if kind == 0:
                data[at] = self._rng.randrange(256)
            elif kind == 1:
                data[at:at] = self._rng.randbytes(self._rng.randrange(1, 5))
            else:
                del data[at : at + self._rng.randrange(1, 5)]
        return Case("mutated", [bytes(data)])

    def odd_head(self) -> Case:
        kinds = (
            request(self._rng.choice(("BREW", "TRACE", "CONNECT", "OPTIONS", "PUT", "M-SEARCH", "PRI")), "/livez"),
            request("OPTIONS", "*"),
            request("GET", "http://localhost/livez"),
            request("GET", "http://" + "a" * 300),
            request("GET", "//livez"),
            request("GET", "/%00%0a%ff/../livez"),
            request("GET", "/livez", b"host: other", b"host: third"),
            request("GET", "/livez", b"origin: null", b"access-control-request-method: \xff"),
            request("GET", "/livez", b"x-forwarded-for: \xff\xfe, ,", b"x-request-id: \xe9"),
            request("POST", "/moved", b'x-pdserve-ticket: {"key": "\xff"}'),
            request("GET", "/livez", version=self._rng.choice((b"0.9", b"2.0", b"1.2", b"9.9", b"x"))),
            b"GET /livez\r\n\r\n",
            b"GET  /livez  HTTP/1.1\r\n\r\n",
            b"\r\n" * self._rng.randrange(1, 50) + request("GET", "/livez"),
            request("GET", "/livez").replace(b"\r\n", b"\n"),
            request("GET", "/livez", b" folded: x", b": no name", b"no colon"),
        )
        return Case("odd head", [self._rng.choice(kinds)])

    def expecting(self) -> Case:
        path, body = self._rng.choice(GENERATIONS)
        data = request("POST", path, b"expect: 100-continue", body=json.dumps(body).encode())
        return Case("expecting", [data[: -self._rng.randrange(1, 20)]])

    def upgrading(self) -> Case:
        protocol = self._rng.choice((b"h2c", b"websocket", b"TLS/1.0"))
        headers = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + protocol, b"http2-settings: AAMAAABk")
        return Case("upgrading", self._torn(self.good(b"1.1", *headers) + self.good(), 2), owed=2)

    def noise(self) -> Case:
        first = self._rng.choice((b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""))
        return Case("noise", [first + self._rng.randbytes(self._rng.randrange(1, 400))])

    # --- trying one ---

    def _torn(self, data: bytes, parts: int) -> list[bytes]:
        cuts = sorted(self._rng.randrange(len(data)) for _ in range(parts - 1))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]

    def _try(self, case: Case) -> None:
        with socket.create_connection(("127.0.0.1", self._port), self._seconds) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):  # it may have heard enough
                for part in case.parts:
                    sock.sendall(part)
                if case.then == "half_close":
                    sock.shutdown(socket.SHUT_WR)
            if case.then == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
                return
            statuses = self._answers(sock, case)
        assert len(statuses) >= case.owed, f"{len(statuses)} of {case.owed} answers came: {statuses}"
        assert 500 not in statuses
        self.statuses.update(statuses)

    def _answers(self, sock: socket.socket, case: Case) -> list[int]:
        """Return the statuses of the answers, after all that are due have come or the server has closed."""
        data, sent = b"", b"".join(case.parts)
        while True:
            found = [int(status) for status in STATUS_LINE.findall(data)]
            done = len(found) >= case.owed
            readable, _, _ = select.select([sock], [], [], PATIENCE if done else self._seconds)
            if not readable:
                assert done, f"no answer within {self._seconds} s; so far {data[-300:]!r}"
                break
            try:
                more = sock.recv(1 << 16)
            except ConnectionError:
                break
            if not more:
                break
            data += more
        assert not data or STATUS_LINE.match(data), f"no HTTP: {data[:100]!r} for {sent[:100]!r}"
        return [int(status) for status in STATUS_LINE.findall(data)]
