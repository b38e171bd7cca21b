"""Seeded hostile traffic from a client that reaches every port of a running pair and holds no secret."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec
import psutil

from pdserve.disaggregation.bootstrap.registration import Registration
from pdserve.disaggregation.handover.control.frames import LENGTH as CONTROL_LENGTH
from pdserve.disaggregation.handover.control.frames import greeting
from pdserve.disaggregation.transfer.backends.handshake import LENGTH, Greeting, Offer, frame
from pdserve.messages.base import HandoverId
from pdserve.messages.channel import encode
from pdserve.messages.handover import (
    Abort,
    AbortAck,
    Declined,
    Forecast,
    ForecastRequest,
    Heartbeat,
    Hello,
    Invite,
    Progress,
    RoomQueued,
    TransferRequest,
    Welcome,
)
from support.control_wire import ControlSocket, framed
from support.processes import Launched, Pair

HALF_OPEN = 100
"""Connections that are left open without a word, in all; older ones are closed for new ones."""
RST = struct.pack("ii", 1, 0)
REPLY_SECONDS = 5.0


def listening_ports(server: Launched, process: str) -> set[int]:
    """TCP ports that a process of the instance listens on."""
    found: psutil.Process = server.family()[process]
    return {c.laddr.port for c in found.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@dataclass(frozen=True)
class Target:
    """What a stranger can find out about a pair: ports by scanning, epochs from /server_info."""

    http: tuple[int, ...]
    bootstrap: int
    control: int
    data: tuple[int, ...]
    registration: Registration
    decode_epoch: str
    decode_data: int


def find_target(pair: Pair) -> Target:
    """Look at a running pair from outside."""
    args = pair.prefill.args
    bootstrap = int(args[args.index("--disaggregation-bootstrap-port") + 1])
    answer = httpx.get(f"http://127.0.0.1:{bootstrap}/registration", trust_env=False)
    registration = msgspec.json.decode(answer.content, type=Registration)
    prefill_data, decode_data = (listening_ports(server, "worker") for server in (pair.prefill, pair.decode))
    return Target(
        http=(pair.prefill.port, pair.decode.port, pair.router.port),
        bootstrap=bootstrap,
        control=registration.control_port,
        data=(*prefill_data, *decode_data),
        registration=registration,
        decode_epoch=pair.decode.info()["epoch"],
        decode_data=next(iter(decode_data)),
    )


class Stranger:
    """``send(count)`` sends that many frames, each to a port by chance; ``close`` hangs up."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.sent: dict[str, int] = {}
        self._control: ControlSocket | None = None
        self._idle: list[socket.socket] = []

    def send(self, count: int) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.control_frame, 50),
            (self.control_bytes, 6),
            (self.data_bytes, 20),
            (self.http_bytes, 12),
            (self.bootstrap_bytes, 10),
            (self.half_open, 2),
        ]
        if not self.target.data:
            kinds.remove((self.data_bytes, 20))
        for kind in self.rng.choices([k for k, _ in kinds], [w for _, w in kinds], k=count):
            kind()
            self.sent[kind.__name__] = self.sent.get(kind.__name__, 0) + 1

    def close(self) -> None:
        for sock in self._idle:
            sock.close()
        self._hang_up()

    # --- the control port ---

    def control_frame(self) -> None:
        """Send random messages within the protocol's frames, so that they reach the decoder.

        It opens a new connection after the target has hung up.
        """
        rng = self.rng
        data = framed(self._control_payload())
        if rng.random() < 0.05:
            data = b"".join(framed(self._control_payload() or b"x") for _ in range(rng.randrange(2, 6)))
        if rng.random() < 0.02:
            self._hang_up()
        for _ in range(2):
            try:
                if self._control is None:
                    self._control = ControlSocket(self.target.control)
                if not self._control.has_ended():
                    if rng.random() < 0.02 and len(data) < 200:
                        for byte in data:  # in drips
                            self._control.send_bytes(bytes([byte]))
                    else:
                        self._control.send_bytes(data)
                    return
            except OSError:
                pass
            self._hang_up()

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close(linger=self.rng.choice([0, None]))
        self._control = None

    def _control_payload(self) -> bytes:
        rng = self.rng
        honest = encode([self._control_message() for _ in range(rng.choice([1, 1, 1, 3]))])
        kind = rng.randrange(8)
        if kind <= 2:
            return honest
        if kind == 3:
            return spoil(rng, honest)
        if kind == 4:
            return self._wrong_types()
        if kind == 5:
            bad = honest.replace(self.target.registration.epoch.encode(), b"\xff" * len(self.target.registration.epoch))
            return bad if rng.random() < 0.5 else b"\x91\xa3\xff\xfe\xfd"
        if kind == 6:
            return rng.choice([nested, huge_length])(rng)
        return rng.randbytes(rng.choice([0, 1, 7, 100, 3000, 3000, 2_000_000 if rng.random() < 0.02 else 1]))

    def _control_message(self):
        rng, target = self.rng, self.target
        epoch = rng.choice([target.registration.epoch, target.registration.epoch, target.decode_epoch, "", "x" * 128])
        room = rng.choice([0, 1, rng.getrandbits(63), (1 << 63) - 1])
        handover = HandoverId(
            rng.choice([target.decode_epoch, epoch]), room, rng.choice([0, 1, 2, rng.getrandbits(63)])
        )
        pages = rng.randbytes(4 * rng.randrange(100))
        return rng.choice(
            [
                Heartbeat(epoch),
                Invite(epoch, rng.randbytes(30)),
                Welcome(epoch),
                AbortAck(epoch, handover),
                RoomQueued(epoch, handover),
                ForecastRequest(epoch, handover),
                Forecast(epoch, handover, rng.choice([0.0, 1e-300, 1e9])),
                Declined(epoch, handover),
                Progress(epoch, handover, rng.choice([0, 1, (1 << 31) - 1])),
                Abort(epoch, handover, rng.choice(["", "no\nnew [forged] line", "x" * 2048])),
                TransferRequest(
                    epoch, handover, rng.randrange(1 << 31), rng.getrandbits(64), rng.randrange(4096), [pages]
                ),
                self._hello(epoch),
                self._hello(target.registration.epoch),
            ]
        )

    def _hello(self, epoch: str) -> Hello:
        """Make a Hello with a fitting model and layout, as in the registration.

        The sender is the real decode, or does not exist.
        """
        rng, registration = self.rng, self.target.registration
        sender = rng.choice([self.target.decode_epoch, rng.randbytes(8).hex(), "x" * 128])
        offer = Offer("tcp", sender, rng.randbytes(16), 1 << 20, "127.0.0.1", self.target.decode_data)
        metadata = rng.choice([msgspec.msgpack.encode(offer), rng.randbytes(50), b"", huge_length(rng)])
        return Hello(
            epoch,
            sender,
            rng.choice([1, rng.getrandbits(62) + 1]),
            registration.version,
            registration.fingerprint,
            registration.layout,
            "tcp",
            metadata,
        )

    def _wrong_types(self) -> bytes:
        rng = self.rng
        fields = msgspec.to_builtins(self._control_message(), builtin_types=(bytes,))
        for name in rng.sample(sorted(fields), k=rng.randrange(1, len(fields) + 1)):
            fields[name] = junk(rng)
        if rng.random() < 0.2:
            fields[rng.randbytes(3).hex()] = junk(rng)
        return msgspec.msgpack.encode([fields])

    def control_bytes(self) -> None:
        """Good greetings with what is no frame behind them, other protocols, noise."""
        rng = self.rng
        zmtp = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        data = rng.choice(
            [
                greeting() + CONTROL_LENGTH.pack(rng.choice([0, 1, 1 << 14, 1 << 20, (1 << 32) - 1])),
                greeting() + CONTROL_LENGTH.pack(rng.getrandbits(32)) + rng.randbytes(100),
                greeting() + framed(self._control_payload() or b"x")[:-1],
                greeting() + framed(encode([self._hello(self.target.registration.epoch)])) * 5,
                greeting(rng.randbytes(32), rng.choice([1, 2, rng.getrandbits(32)]))
                + framed(encode([Heartbeat(self.target.registration.epoch)])),
                greeting()[: rng.randrange(44)],
                zmtp,
                zmtp + ready + b"\x01\x01x" * 20,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(32),
                rng.randbytes(80),
                b"GET / HTTP/1.1\r\n\r\n",
            ]
        )
        self._tcp(self.target.control, spoil(rng, data) if rng.random() < 0.5 else data)

    def crowd(self, count: int) -> None:
        """Open ``count`` connections to the control port, one after another. Half of them end in a reset."""
        socks = []
        for i in range(count):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", self.target.control), REPLY_SECONDS)
                socks.append(sock)
                sock.sendall(greeting() if i % 3 else b"")
            if len(socks) > HALF_OPEN:
                old = socks.pop(0)
                if i % 2:
                    old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
                old.close()
        for sock in socks:
            sock.close()

    # --- the others ---

    def data_bytes(self) -> None:
        """Greetings, true in all but the secret."""
        rng, target = self.rng, self.target
        receiver = rng.choice([target.decode_epoch, target.registration.epoch, "x" * 128])
        greeting = Greeting(rng.choice([1, 1, 1, 2]), target.registration.epoch, receiver, rng.randbytes(16))
        body = rng.choice([b"\x81\xa1\xff\x01", nested(rng), huge_length(rng), rng.randbytes(rng.randrange(1, 4000))])
        data = rng.choice(
            [
                frame(greeting),
                frame(greeting),
                spoil(rng, frame(greeting)),
                LENGTH.pack(len(body[:4096])) + body[:4096],
                LENGTH.pack(rng.getrandbits(32)) + rng.randbytes(20),
                frame(greeting) * 5,
            ]
        )
        self._tcp(rng.choice(target.data), data)

    def http_bytes(self) -> None:
        """Send invalid requests and invalid bodies to the instances and the router."""
        rng = self.rng
        body = rng.choice(
            [
                json.dumps({"text": junk_json(rng), "sampling_params": junk_json(rng)}).encode(),
                json.dumps({"input_ids": junk_json(rng), "bootstrap_room": junk_json(rng)}).encode(),
                b'{"text": "\xff\xfe"}',
                b'{"text": ' + b"[" * 5000,
                b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}",
                b'{"temperature": NaN}',
                rng.randbytes(100),
            ]
        )
        path = rng.choice(
            ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/%ff%00", "/../registration"]
        )
        self._tcp(rng.choice(self.target.http), self._http("POST", path, body))

    def bootstrap_bytes(self) -> None:
        """Forged and replayed registrations, and noise."""
        rng, registration = self.rng, self.target.registration
        forged = msgspec.structs.replace(
            registration, epoch=rng.randbytes(8).hex(), control_port=rng.randrange(1, 65536)
        )
        body = msgspec.json.encode(rng.choice([forged, registration]))
        path = rng.choice(["/registration", f"/registration?epoch={registration.epoch}", "/registration?epoch=%ff"])
        data = rng.choice(
            [
                self._http("PUT", path, body),
                self._http("PUT", path, body, "Authorization: Bearer wrong\r\n"),
                self._http("DELETE", path, b""),
                self._http("DELETE", path, b"", "Authorization: Bearer\r\n"),
                self._http("PUT", path, nested(rng)),
            ]
        )
        self._tcp(self.target.bootstrap, data)

    def _http(self, method: str, path: str, body: bytes, headers: str = "") -> bytes:
        rng = self.rng
        length = rng.choice([len(body), len(body), len(body), 1 << 62, "x"])
        host = "x" if rng.random() < 0.1 else "localhost"
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: {length}\r\n\r\n".encode()
        return spoil(rng, head + body) if rng.random() < 0.3 else head + body

    def half_open(self) -> None:
        """Open a connection and send nothing."""
        target = self.target
        port = self.rng.choice([*target.http, target.bootstrap, target.control, *target.data])
        with contextlib.suppress(OSError):
            self._idle.append(socket.create_connection(("127.0.0.1", port), REPLY_SECONDS))
        if len(self._idle) > HALF_OPEN:
            self._idle.pop(0).close()

    def _tcp(self, port: int, data: bytes) -> None:
        """Send, then reset, close at once, or listen first to what is said."""
        rng = self.rng
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), REPLY_SECONDS) as sock:
            way = rng.randrange(3)
            sock.sendall(data)
            if way == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            elif way == 1:
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(0.05)
                sock.recv(4096)


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Cut short, with a byte changed, or with bytes in between."""
    at = rng.randrange(len(data)) if data else 0
    return rng.choice(
        [data[:at], data[:at] + rng.randbytes(1) + data[at + 1 :], data[:at] + rng.randbytes(5) + data[at:]]
    )


def nested(rng: random.Random) -> bytes:
    """Deeper than any decoder wants to go, in msgpack or JSON."""
    depth = rng.choice([10, 1000, 100_000])
    return rng.choice([b"\x91" * depth, b"\x81\xa1a" * depth, b"[" * depth, b"\x91\x82\xa4type" + b"\x91" * depth])


def huge_length(rng: random.Random) -> bytes:
    """Return an array, map, string or byte string that claims to have 4 GiB."""
    return rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\x91\xdf"]) + b"\xff\xff\xff\xff" + rng.randbytes(3)


def junk(rng: random.Random):
    """Return a value that is invalid in every field."""
    numbers = [-1, 1 << 31, 1 << 62, -(1 << 63), (1 << 64) - 1, 0, 1.5, float("nan"), float("inf")]
    return rng.choice([*numbers, None, True, [], {}, "x" * rng.choice([0, 5, 100_000]), b"\0" * 7, [[[]]], {"a": {}}])


def junk_json(rng: random.Random):
    """Draw a bad value that JSON can express, and that is no valid prompt."""
    return rng.choice(
        [-1, 1 << 70, 1.5, float("nan"), True, {}, [[]], [{}], {"a": 1}, [["x", 1]], [1 << 40], "\0" * 2000 + "x"]
    )
