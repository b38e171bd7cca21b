"""How a hostile client sends its requests, and how answers get to the record."""

from __future__ import annotations

import random
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

import httpx

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import PathTable

from .cluster import MALLORY, ROUTER, Cluster
from .watch import Record

RST = struct.pack("ii", 1, 0)
READ_BYTES = 8 << 20
"""Bytes of one answer that the attacker reads before it hangs up."""
TABLE = PathTable(PATHS)
PARAM = re.compile(rb'"param":\s*"([^"]{1,120})"')
OTHER = "other paths and methods"
Reads = Callable[[bytes], bool]


class Answer(NamedTuple):
    """A status (0: none came) and a body, which may have been left before its end."""

    status: int
    body: bytes


NO_ANSWER = Answer(0, b"")


def label_of(method: str, path: str) -> str:
    """Return the method and the path as the server's table has them."""
    plain = unquote(path.partition("?")[0])
    facts = TABLE.find(plain, method)
    asked = "GET" if method == "HEAD" else method
    return f"{asked} {facts.label}" if facts is not None and asked in facts.methods else OTHER


def refused_field(body: bytes) -> str:
    """Return the field that an error names, without numbers; "" if it names none."""
    found = PARAM.search(body[:4096])
    return re.sub(r"\d+", "N", found[1].decode(errors="replace")) if found is not None else ""


def read_all(answer: bytes) -> bool:
    """Read an answer to its end."""
    return True


def read_none(answer: bytes) -> bool:
    """Hang up after the first part of an answer."""
    return False


class Sender:
    """Sends requests with mallory's key to a server that ``rng`` draws, and records what comes back."""

    def __init__(self, cluster: Cluster, record: Record, rng: random.Random) -> None:
        self._cluster, self._record, self._rng = cluster, record, rng
        self.http = cluster.client(MALLORY)

    def url(self) -> str:
        """Return the URL of the router, or less often of an instance."""
        urls = self._cluster.urls
        return urls[self._rng.choice((ROUTER, ROUTER, *sorted(urls)))]

    def connected(self, url: str) -> socket.socket:
        """Return a connection to a server."""
        return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10)

    def send(
        self,
        kind: str,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        url: str = "",
        headers: dict[str, str] | None = None,
        reads: Reads = read_all,
        judged: bool = True,
    ) -> Answer:
        """Send a request and return what was read of its answer.

        ``reads`` gets the answer so far and returns whether to read on. ``judged``: whether the answer may hold nothing
        of another's. A request may name it itself.
        """
        server = url or self.url()
        self._record.sent(kind, (method, server + path, body[:500]))
        answer, lines, status = b"", b"", 0
        headers = {"content-type": "application/json"} | (headers or {})
        with (
            suppress(httpx.HTTPError, httpx.InvalidURL, UnicodeError),
            self.http.stream(method, server + path, content=body, headers=headers) as response,
        ):
            status, lines = response.status_code, repr(response.headers.raw).encode()
            for data in response.iter_raw():
                answer += data
                if len(answer) > READ_BYTES or not reads(answer):
                    break
        if not status:
            return NO_ANSWER
        self._record.got(kind, status, answer if judged else b"", lines)
        self._record.answered(label_of(method, path), status, refused_field(answer) if status >= 400 else "")
        return Answer(status, answer)

    def send_part(self, kind: str, path: str, body: bytes, length: int, *, resets: bool) -> None:
        """Send a request with a body that is not as long as it says, and then a reset, or an end.

        ``length``: what the request says, in bytes. Of a longer ``body``, the rest is a second request.
        """
        rng = self._rng
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._cluster.keys[MALLORY]}\r\n"
        data = f"{head}content-length: {length}\r\n\r\n".encode() + body
        self._record.sent(kind, data[:300])
        with suppress(OSError), self.connected(self.url()) as sock:
            sock.sendall(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
            if resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            else:
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(2)
                self._record.seen(kind, sock.recv(1 << 16))

    def close(self) -> None:
        """Close all connections."""
        self.http.close()
