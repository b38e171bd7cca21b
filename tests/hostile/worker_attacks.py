"""Attacks on the membership of a router, by clients without its admin key: whatever they show is refused."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress

import httpx
from support.machine import limit

from .cluster import ALICE, MALLORY, Cluster
from .signed import Signer
from .watch import Record
from .worker_requests import TRICKS, Credentials, Header, WorkerRequest, WorkerRequests

KIND = "workers"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z]")
LISTING = b'"workers":'
"""What the list of members begins with."""
READ_BYTES = 1 << 20
AT_ONCE = 10
"""Requests of one attack. They cost little beside most other attacks."""


class WorkerAttacks:
    """Sends requests for ``/workers`` to the routers of a cluster. ``credentials``: how the attacker names itself."""

    def __init__(self, cluster: Cluster, record: Record, rng: random.Random, credentials: Credentials) -> None:
        self._cluster, self._record, self._rng = cluster, record, rng
        self._credentials = credentials

    def attack(self) -> None:
        """Send some requests, one after the other."""
        for _ in range(AT_ONCE):
            self.ask()

    def ask(self) -> None:
        """Send one request, and judge what comes back."""
        routers = self._cluster.routers
        requests = WorkerRequests(self._rng, self._cluster.bait.port, [*self._cluster.instances.values()], routers)
        request, url = requests.draw(self._credentials), self._rng.choice(routers)
        self._record.sent(KIND, (request.method, url + request.target[:300], request.headers, request.body[:200]))
        try:
            answer = exchanged(int(url.rpartition(":")[2]), request.data())
        except TimeoutError:
            self._record.violated(f"{KIND}: no answer to {request.method} {request.target[:300]}")
            return
        judge(self._record, request, answer)


def exchanged(port: int, data: bytes) -> bytes:
    """Return what comes back until the connection ends. Raises ``TimeoutError``."""
    answer = b""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), limit(30)) as sock:
        with suppress(ConnectionError):  # an early answer ends the connection
            sock.sendall(data)
        while len(answer) < READ_BYTES and (part := sock.recv(1 << 16)):
            answer += part
    return answer


def judge(record: Record, request: WorkerRequest, answer: bytes) -> None:
    """Judge the answers to a request for ``/workers``: it is refused, and says nothing of the members."""
    statuses = [status for status in map(int, STATUS.findall(answer)) if status >= 200]
    if not statuses:
        record.got(KIND, 0, answer)  # an answer can be lost if the connection ends before the body was sent
    for status in statuses:
        record.got(KIND, status, answer)
        if not 400 <= status < 500:
            record.violated(f"{KIND}: {request.method} {request.target[:300]} got {status}: {answer[:500]!r}")
    if LISTING in answer:
        record.violated(f"{KIND}: {request.method} {request.target[:300]} was told the members: {answer[:500]!r}")


def user_credentials(cluster: Cluster, rng: random.Random) -> Credentials:
    """Return the credentials of a client with a user's key: the key, at times beside forged ones."""
    key = cluster.keys[MALLORY]
    shown: list[list[Header]] = [
        *([("authorization", f"Bearer {key}")], [("authorization", f"Bearer {key}")], [("x-api-key", key)]),
        [("authorization", f"Bearer {key}"), ("authorization", "Bearer admin")],
        [("authorization", f"Bearer {key}"), ("x-api-key", "admin")],
        *([("authorization", f"bearer {key}, Bearer admin")], [("authorization ", f"Bearer {key}")]),
    ]
    return lambda method, target, body: [*rng.choice(shown), *forged(rng)]


def no_credentials(rng: random.Random) -> Credentials:
    """Return the credentials of a client without a key: none, or forged ones."""
    return lambda method, target, body: forged(rng)


def forged(rng: random.Random) -> list[Header]:
    """Return headers that prove nothing; most often none."""
    if rng.random() < 0.6:
        return []
    made = [("authorization", "Bearer " + "x" * rng.choice((1, 32, 5000))), ("x-api-key", "\x7f" * 8)]
    return [rng.choice(made)] if rng.random() < 0.5 else [*rng.choice(TRICKS)]


def signed_credentials(cluster: Cluster, rng: random.Random, http: httpx.Client) -> Credentials:
    """Return the credentials of a peer: signatures by the cluster secret, as routers send them to instances."""
    signer = Signer(cluster)

    def sign(method: str, target: str, body: bytes) -> list[Header]:
        epochs: list[Callable[[], bytes]] = [
            lambda: signer.epoch(rng.choice(sorted(cluster.instances.values())), http),
            lambda: b"",
            lambda: rng.randbytes(8).hex().encode(),
        ]
        caller = rng.choice(("(admin)", "(admin)", "(admin)", "admin", ALICE, MALLORY, ""))
        age = rng.choice((0.0, 0.0, 0.0, 130.0, -130.0))
        return [*signer.headers(rng.choice(epochs)(), method, target, body, caller, age).items()]

    return sign
