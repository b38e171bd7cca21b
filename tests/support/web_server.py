"""A scripted HTTP server in a thread, for clients that block."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Connection:
    """One request, as the script that answers it sees it. ``body``: parsed JSON, None without one."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.path = handler.path.partition("?")[0]
        self.headers = handler.headers
        raw = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        self.body = json.loads(raw) if raw else None

    def answer(
        self, status: int, content: Any, kind: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer. ``content`` that is not bytes goes as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self._head(status, kind, {"content-length": str(len(body)), **(headers or {})})
        if self._handler.command != "HEAD":
            self._handler.wfile.write(body)

    def begin_stream(self) -> None:
        """Send the head of a stream that ends with the connection."""
        self._head(200, "text/event-stream", {})

    def send(self, data: bytes) -> None:
        """Send a piece of the stream."""
        self._handler.wfile.write(data)

    def event(self, content: Any) -> None:
        """Send a server-sent event. Characters beyond ASCII stay as they are, as in our server."""
        self.send(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")

    def wait_until_dropped(self) -> None:
        """Wait until the client closes the connection."""
        assert self._handler.connection.recv(1) == b""

    def _head(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self._handler.send_response(status)
        for name, value in {"content-type": kind, "connection": "close", **headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
        self._handler.close_connection = True


class WebServer:
    """Answers by ``scripts``: path, without its query, to what does it. Records every request. ``port`` 0: any."""

    def __init__(self, scripts: Mapping[str, Callable[[Connection], None]], port: int = 0) -> None:
        self.requests: list[Connection] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                connection = Connection(self)
                server.requests.append(connection)
                script = scripts.get(connection.path)
                if script is None:
                    connection.answer(404, {"error": {"message": f"there is no {connection.path}"}})
                else:
                    script(connection)

            do_POST = do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing: pytest shows what went wrong."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore the error: a client may leave in the middle."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Any]:
        """Return the bodies that came for ``path``."""
        return [request.body for request in self.requests if request.path == path]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def web_server(scripts: Mapping[str, Callable[[Connection], None]]) -> Iterator[WebServer]:
    """Run a ``WebServer`` for the duration of the block."""
    server = WebServer(scripts)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port that refuses connections: it is bound, so no process can take it, and there is no listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
