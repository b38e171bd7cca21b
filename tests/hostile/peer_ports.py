"""What a hostile peer listens at: a bootstrap server that names it, and a data port; and how it writes to another's."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from pdserve.disaggregation.bootstrap.registration import Registration
from pdserve.disaggregation.transfer.backends.handshake import (
    LENGTH,
    WIRE_VERSION,
    Greeting,
    GreetingAnswer,
    Offer,
    OfferedGroup,
    frame,
)
from pdserve.disaggregation.transfer.backends.page_stream import ANSWER, BATCH
from pdserve.messages.base import HandoverId

RST = struct.pack("ii", 1, 0)
POOL_PAGES = 1024
"""Pages that the peer claims to have."""
SOCKET_SECONDS = 5.0


class BootstrapPort:
    """A bootstrap server. Its registration is mostly ``registration``, and at times a changed one."""

    def __init__(self, registration: Callable[[], Registration], rng: random.Random) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = msgspec.json.encode(registration())
                status = 200
                kind = rng.randrange(12)
                if kind == 0:
                    body = body[: rng.randrange(len(body))]
                elif kind == 1:
                    body, status = json.dumps({"error": "x\n" * 500}).encode(), 503
                elif kind == 2:
                    body = b"[" * 100_000
                self.send_response(status)
                self.send_header("content-length", str(len(body) + (kind == 3) * 1000))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True, name="bootstrap").start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class DataPort:
    """Where workers of instances that were invited write to. ``rooms``: those that are known to be the attacker's.

    ``on_foreign`` is told of batches of any other room.
    """

    def __init__(
        self, rng: random.Random, registration: Registration, rooms: set[int], on_foreign: Callable[[str], None]
    ) -> None:
        self._rng, self._registration, self._rooms, self._on_foreign = rng, registration, rooms, on_foreign
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._sock.getsockname()[1])
        self.secret = rng.randbytes(16)
        threading.Thread(target=self._accept, daemon=True, name="data port").start()

    def offer(self, epoch: str) -> bytes:
        """Return the metadata of an invitation."""
        layout = self._registration.layout
        groups = [OfferedGroup(POOL_PAGES, group.page_bytes, group.num_layers) for group in layout.groups]
        return msgspec.msgpack.encode(Offer("tcp", epoch, self.secret, groups, "127.0.0.1", self.port))

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()

    def _read_pages(self, sock: socket.socket, group: int, layers: int, count: int) -> None:
        """Read the page numbers and bytes of a batch."""
        layout = self._registration.layout.groups[group]
        _exactly(sock, 4 * count + count * layers * (layout.page_bytes // layout.num_layers))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(sock,), daemon=True, name="data").start()

    def _talk(self, sock: socket.socket) -> None:
        rng = self._rng
        with sock, suppress(OSError, struct.error):
            sock.settimeout(30)
            size = LENGTH.unpack(_exactly(sock, LENGTH.size))[0]
            _exactly(sock, size)
            verdicts = (
                frame(GreetingAnswer()),
                frame(GreetingAnswer()),
                frame(GreetingAnswer("no\n")),
                frame(GreetingAnswer(means=b"x" * 60_000)),
            )
            sock.sendall(rng.choice((*verdicts, rng.randbytes(50), b"\xff\xff\xff\xff")))
            while True:
                number, room, _, group, begin, end, count = BATCH.unpack(_exactly(sock, BATCH.size))
                if room not in self._rooms:
                    self._on_foreign(f"KV of room {room} was sent, which nobody has asked for")
                self._read_pages(sock, group, end - begin, count)
                sock.sendall(ANSWER.pack(rng.choice((number, number, number, number + 1)), rng.choice((0, 1, 1, 255))))
                if rng.random() < 0.3:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
                    return


def write_to(metadata: bytes, mine: str, handover: HandoverId, rng: random.Random) -> None:
    """Write to the pool behind an invitation, as its invited peer ``mine``: pages that were granted or not."""
    offer = msgspec.msgpack.decode(metadata, type=Offer)
    with suppress(OSError), socket.create_connection((offer.place, offer.port), SOCKET_SECONDS) as sock:
        receiver, secret = rng.choice(((offer.epoch, offer.secret),) * 4 + ((offer.epoch, b"x" * 16),))
        sock.sendall(frame(Greeting(WIRE_VERSION, rng.choice((mine, mine, mine, "x" * 128)), receiver, secret)))
        sock.settimeout(2)
        sock.recv(1 << 16)
        for number in range(rng.randrange(1, 6)):
            group = offer.groups[0]
            count = rng.choice((1, 2, 0, 1 << 16, (1 << 32) - 1))
            layers = rng.choice(((0, group.num_layers), (0, 1), (1, 0), (0, 65535)))
            header = BATCH.pack(number, handover.room, handover.attempt, rng.choice((0, 0, 1, 65535)), *layers, count)
            pages = b"".join(rng.choice((1, 2, 0, 2**31 - 1)).to_bytes(4, "little") for _ in range(min(count, 2)))
            sock.sendall(header + pages + rng.randbytes(rng.choice((0, 100, group.page_bytes))))
        if rng.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        else:
            sock.recv(1 << 16)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(min(1 << 16, count - len(data)))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data
