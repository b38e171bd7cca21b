"""Requests to servers, each over a connection of its own that is kept for the next one."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple
from urllib.parse import urlsplit

from ..cluster_auth import CHALLENGE_HEADER, OPEN_CLUSTER, PROOF_HEADER, PROOF_PATH, ClusterAccess, ClusterClient
from .connection import Connection, Headers
from .errors import CannotConnect, ClientError, ConnectionGone
from .pool import ConnectionPool, Origin, SocketOptions
from .response import ClientResponse

MAX_WHOLE_BYTES = 64 << 20
"""Maximum bytes of an answer to a question, far more than any needs. It keeps a faulty server from taking all memory.
"""
MAX_PROOF_ANSWER_BYTES = 64 << 10
FORBIDDEN_IN_VALUE = re.compile(rb"[\0-\x08\n-\x1f\x7f]")
FORBIDDEN_IN_TARGET = re.compile(r"[^!-~]")

RESEND_IDLE_SECONDS = 1.0
"""Idle time above which a kept connection may have been closed by the server's keep-alive timeout.

No server closes connections sooner. One that is lost after a shorter idle time was lost to a crash."""

Body = bytes | Sequence[bytes | memoryview]
"""A request's body, whole or in pieces. Pieces are sent one after the other and not joined."""
SentHeaders = Iterable[tuple[bytes, bytes]]


class Whole(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class _Server(NamedTuple):
    """``head``: what is the same in the heads of all requests to one server."""

    head: bytes
    pool: ConnectionPool[Connection]


class _Request(NamedTuple):
    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: Sequence[bytes | memoryview]
    digest: bytes = b""
    """Digest of the body, for servers of a cluster."""

    def head(self, server: _Server, more: SentHeaders = ()) -> bytes:
        """Return the bytes of the request's head, with the headers ``more``.

        Raises ``ValueError`` if it can't be sent.
        """
        own = header_lines((*self.headers, *more))
        return request_head(self.method, self.path, server.head, own, sum(map(len, self.body)))


class HttpClient:
    """Client for any number of servers. ``headers`` go with each request, beside the host.

    With a ``ClusterClient``, a server gets nothing before it has proven that it belongs to the cluster, and requests to
    it are signed. Only connecting (``connect_seconds``) and the proof have a time limit; the caller limits the time of
    an answer. Redirects are answers like any other. Proxies and other settings of the environment are ignored.
    """

    def __init__(
        self,
        headers: SentHeaders,
        connect_seconds: float,
        socket_options: SocketOptions = (),
        cluster: ClusterAccess = OPEN_CLUSTER,
    ) -> None:
        self._headers = header_lines(headers)
        self._cluster = cluster
        self._connect_seconds = connect_seconds
        self._socket_options = socket_options
        self._servers: dict[str, _Server] = {}

    async def send(
        self,
        method: str,
        url: str,
        path: str,
        body: Body = b"",
        headers: SentHeaders = (),
        silence: float | None = None,
        *,
        at_most_once: bool = False,
    ) -> ClientResponse:
        """Send a request to the server at ``url`` (``http://host:port``) and wait until its answer begins.

        The caller must close the answer. ``silence``: seconds of silence in the body after which reading it raises
        ``TimeoutError``; None: no limit. Raises ``ClientError``. Raises ``ValueError`` for a path or header that can't
        be sent.

        A server may close a kept connection (keep-alive timeout) while a request is on its way to it. Such a request is
        sent once more, on a new connection. The connection must have been idle for more than ``RESEND_IDLE_SECONDS``
        and have ended without a byte of an answer. So the server may, rarely, have begun it twice.

        ``at_most_once``: never send the request twice, because it may be what crashed the server. Connections that were
        idle for that long are not used for it, so a keep-alive timeout can't hit it either.
        """
        server, pieces = self._server(url), [body] if isinstance(body, bytes) else body
        digest = await self._cluster.digest(pieces)
        request, pool = _Request(method, path, tuple(headers), pieces, digest), server.pool
        request.head(server)  # raises before anything is sent, if the request is invalid
        gone: ConnectionGone | None = None
        kept = pool.take_kept()
        if kept is not None and at_most_once and kept.idle_seconds > RESEND_IDLE_SECONDS:
            # The connections below it were idle for longer.
            pool.put_back(kept)
            kept = None
        if kept is not None:
            try:
                return await self._ask(kept.connection, pool, self._message(request, server, kept.connection), silence)
            except ConnectionGone as e:
                if not e.untouched or kept.idle_seconds <= RESEND_IDLE_SECONDS:
                    raise
                gone = e
        try:
            connection = await pool.connect()
            await self._cluster.prove(partial(self._prove, connection, server, url))
        except CannotConnect as e:
            raise gone or e from None  # what came first says more
        return await self._ask(connection, pool, self._message(request, server, connection), silence)

    async def fetch(self, method: str, url: str, path: str, body: Body = b"", headers: SentHeaders = ()) -> Whole:
        """Send a request as ``send`` does, and return the whole answer, whatever its status.

        Only connecting has a time limit. Raises ``ClientError``, and of these ``AnswerTooLong`` above
        ``MAX_WHOLE_BYTES``.
        """
        answer = await self.send(method, url, path, body, headers)
        try:
            return Whole(answer.status, answer.headers, await answer.read_all(MAX_WHOLE_BYTES))
        finally:
            answer.close()

    def forget(self, url: str) -> None:
        """Close the connections to the server at ``url`` that are kept. Those in use close soon after their answers.

        A proof of the server stays valid for this URL alone: another server that shows it is still refused.
        """
        if (server := self._servers.pop(url, None)) is not None:
            server.pool.close()

    def close(self) -> None:
        """Close the connections that are kept."""
        for server in self._servers.values():
            server.pool.close()

    def _message(self, request: _Request, server: _Server, connection: Connection) -> list[bytes | memoryview]:
        signatures = self._cluster.signatures(
            connection.epoch, request.method, request.path, request.headers, request.digest
        )
        return [request.head(server, signatures), *request.body]

    async def _prove(self, connection: Connection, server: _Server, url: str, cluster: ClusterClient) -> None:
        """Have the server at the new ``connection`` prove which instance it is, and set the connection's epoch.

        Closes the connection and raises ``CannotConnect`` if the server can't.
        """
        challenge = cluster.challenge()
        question = _Request("GET", PROOF_PATH, ((CHALLENGE_HEADER, challenge),), ())
        answer = ClientResponse(connection, lambda: None, cluster.proof_seconds)
        try:
            async with asyncio.timeout(cluster.proof_seconds):
                connection.ask([question.head(server)], answer)
                await answer.head()
                epoch = cluster.proven(challenge, answer.header(PROOF_HEADER), url)
                if epoch is not None:
                    await answer.read_all(MAX_PROOF_ANSWER_BYTES)
        except TimeoutError:
            epoch, problem = None, f"does not answer {PROOF_PATH} within {cluster.proof_seconds:g} s"
        except ClientError as e:
            epoch, problem = None, f"does not answer {PROOF_PATH}: {e}"
        else:
            problem = "can't prove that it belongs to this cluster: start it with this router's --cluster-secret-file"
        finally:
            answer.close()
        if epoch is None or not connection.usable:
            connection.close()
            raise CannotConnect(f"the server there {problem}")
        connection.epoch = epoch

    async def _ask(
        self,
        connection: Connection,
        pool: ConnectionPool[Connection],
        message: Iterable[bytes | memoryview],
        silence: float | None,
    ) -> ClientResponse:
        answer = ClientResponse(connection, lambda: pool.give_back(connection), silence)
        connection.ask(message, answer)
        try:
            await answer.head()
        except BaseException:  # also when cancelled: the answer would never be read
            answer.close()
            raise
        return answer

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Settings for all ``https`` servers. Made once, because that blocks the loop for 65 ms and takes 1 MiB."""
        return ssl.create_default_context()

    def _server(self, url: str) -> _Server:
        server = self._servers.get(url)
        if server is None:
            host = urlsplit(url).netloc.rpartition("@")[2].encode("ascii")
            origin = Origin.of(url)
            tls = self._tls if origin.tls else None
            pool = ConnectionPool(origin, Connection, self._connect_seconds, self._socket_options, tls)
            server = self._servers[url] = _Server(b"host: %b\r\n%b" % (host, self._headers), pool)
        return server


def request_head(method: str, path: str, fixed: bytes, own: bytes, body_bytes: int) -> bytes:
    """Make the head of a request from its lines of headers: ``fixed`` for the server, and ``own``.

    Raises ``ValueError`` for a path that is not valid on the wire.
    """
    if FORBIDDEN_IN_TARGET.search(path):
        raise ValueError(f"not a path that can be asked for, quote it: {path!r}")
    size = b"content-length: %d\r\n" % body_bytes if body_bytes or method == "POST" else b""
    return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % (method.encode("ascii"), path.encode("ascii"), fixed, own, size)


def header_lines(headers: SentHeaders) -> bytes:
    """Format headers as they are sent. Raises ``ValueError`` for a value that would end its line."""
    lines = []
    for name, value in headers:
        if FORBIDDEN_IN_VALUE.search(value):
            raise ValueError(f"not a value that can be sent: {name!r}: {value!r}")
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)
