"""A hostile local user: no key, every port of router and instances, overheard requests, and another uid's files."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import httpx
from support.hostile_http import HostileClient
from support.machine import limit
from support.strangers import Stranger, Target

from pdserve.disaggregation.bootstrap.registration import Registration, decode_registration
from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import Access

from .cluster import ALICE, Cluster
from .neighbour import Neighbour
from .other_uid import intrusions
from .signed import Signer
from .watch import Record
from .worker_attacks import WorkerAttacks, no_credentials

THREADS = 2


def find_target(cluster: Cluster) -> tuple[Target, Target]:
    """Return the prefill and the decode as targets, with what a stranger can find out."""
    ports = cluster.listening()
    registered: dict[str, Registration] = {}
    for role, port in cluster.bootstraps.items():
        answer = httpx.get(f"http://127.0.0.1:{port}/registration", trust_env=False)
        registered[role] = decode_registration(answer.content)
    data = tuple(port for name, found in ports.items() if "worker" in name.split(" < ")[0] for port in found)
    http = tuple(int(url.rpartition(":")[2]) for url in cluster.urls.values())
    made = []
    for role, registration in registered.items():
        other = next(epoch.epoch for name, epoch in registered.items() if name != role)
        port = registration.control_port
        made.append(Target(http, cluster.bootstraps[role], port, data, registration, other, data[0] if data else 1))
    return made[0], made[1]


class HostileLocal:
    """One thread's attacks, by ``seed``."""

    def __init__(self, cluster: Cluster, neighbour: Neighbour, record: Record, seed: int) -> None:
        self._cluster, self._neighbour, self._record = cluster, neighbour, record
        self._rng = random.Random(seed)
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._signer = Signer(cluster)
        self._strangers = [Stranger(target, seed + i) for i, target in enumerate(find_target(cluster))]
        self._ports = sorted({port for ports in cluster.listening().values() for port in ports})
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self.frames, 40),
            (self.without_key, 30),
            (self.odd_http, 10),
            (self.any_port, 10),
            (self.replay, 10),
            (self.relay, 5),
            (WorkerAttacks(cluster, record, self._rng, no_credentials(self._rng)).attack, 10),
            (self.other_user, 1),
        ]

    def attack(self) -> None:
        """Make one attack, drawn by weight."""
        (kind,) = self._rng.choices([k for k, _ in self._kinds], [w for _, w in self._kinds])
        kind()

    def frames(self) -> None:
        """Send frames to control, data and bootstrap ports."""
        stranger = self._rng.choice(self._strangers)
        before = dict(stranger.sent)
        stranger.send(20)
        for kind, count in stranger.sent.items():
            self._record.kinds[kind] += count - before.get(kind, 0)

    def without_key(self) -> None:
        """Send a request for a path of router or instance with no key, or a made-up one."""
        rng, facts = self._rng, self._rng.choice(PATHS)
        role = rng.choice(sorted(self._cluster.urls))
        path = facts.path.replace("{name:path}", "x").replace("{id:path}", "0?action=save")
        headers = rng.choice(
            [
                {},
                {"authorization": "Bearer " + "x" * rng.choice((0, 1, 32, 5000))},
                {"authorization": "Basic eA=="},
                {"x-api-key": "x"},
                {"x-pdserve-key-name": ALICE},
                {"x-pdserve-key-name": "(admin)"},
                {"x-pdserve-signature": f"{rng.getrandbits(40)}.{'0' * 16}.{'0' * 64}.{'0' * 64}"},
                {"x-pdserve-signature": rng.choice(("", ".", "...", "nan.x.x.x", "1e9." + "x" * 200))},
            ]
        )
        body = json.dumps({"text": "x", "name": "x", "rid": self._neighbour.canary, "abort_all": True}).encode()
        status, answer = self._ask("without key", role, facts.methods[0], path, body, headers)
        # A ticket that is none is refused for what it is.
        if facts.access is not Access.OPEN and status not in (401, 403, 404, 405, 0):
            self._record.violated(f"without key: {role} answered {path} with {status}: {answer[:300]!r}")

    def odd_http(self) -> None:
        """Broken HTTP at any HTTP port."""
        port = self._rng.choice([*self._strangers[0].target.http, *self._cluster.bootstraps.values()])
        self._record.sent("odd http", port)
        hostile = HostileClient(port, self._rng.getrandbits(32), limit(60.0))
        try:
            hostile.run(3, lambda: None)
        except AssertionError as e:
            if port not in self._cluster.bootstraps.values():  # it may hang up on more than one request
                self._record.violated(f"odd http at {port}: {e}")
        self._record.statuses.update({str(status): count for status, count in hostile.statuses.items()})

    def any_port(self) -> None:
        """Noise at every port that any process listens on."""
        rng, port = self._rng, self._rng.choice(self._ports)
        data = rng.choice((b"\r\n\r\n", rng.randbytes(2000), b"GET /registration HTTP/1.1\r\nhost: x\r\n\r\n", b""))
        self._record.sent("any port", (port, data[:100]))
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(0.2)
            self._record.seen("any port", sock.recv(1 << 16))

    def replay(self) -> None:
        """Replay an overheard request of the router: again, changed, too late, or at the other instance."""
        rng, role = self._rng, self._rng.choice(sorted(self._cluster.instances))
        other = next(name for name in self._cluster.instances if name != role)
        url = self._cluster.instances[role]
        epoch = self._signer.epoch(url, self._http)
        body = self._signer.body({"text": f"overheard {rng.random()}", "sampling_params": {"max_new_tokens": 1}})
        headers = self._signer.headers(epoch, "POST", "/tokenize", body)
        kind = rng.choice(("again", "body", "caller", "path", "method", "instance", "late", "early", "longer"))
        if kind == "again":
            self._ask("overheard", role, "POST", "/tokenize", body, headers)
        stolen: dict[str, tuple[str, str, str, bytes, dict[str, str]]] = {
            "again": (role, "POST", "/tokenize", body, headers),
            "body": (role, "POST", "/tokenize", body.replace(b"overheard", b"forgotten"), headers),
            "caller": (role, "POST", "/tokenize", body, headers | {"x-pdserve-key-name": "(admin)"}),
            "path": (role, "POST", "/flush_cache", body, headers),
            "method": (role, "GET", "/tokenize", body, headers),
            "instance": (other, "POST", "/tokenize", body, headers),
            "longer": (role, "POST", "/tokenize?x=1", body, headers),
        }
        for name, age in (("late", 130.0), ("early", -130.0)):
            stale = self._signer.headers(epoch, "POST", "/tokenize", body, age=age)
            stolen[name] = (role, "POST", "/tokenize", body, stale)
        status, answer = self._ask(f"replay: {kind}", *stolen[kind])
        # A body that is not the signed one ends the request as if its client had gone.
        if status not in (0, 401, 405) and not (kind == "body" and status in (400, 499)):
            self._record.violated(f"replay: {kind}: {status}: {answer[:300]!r}")

    def relay(self) -> None:
        """Show the proof of an instance from another port."""
        url = self._cluster.instances[self._rng.choice(sorted(self._cluster.instances))]
        self._record.sent("relay", url)
        self._signer.epoch(url, self._http)  # the router has met the instance
        challenge, proof = self._signer.challenged(url, self._http)
        stolen = f"http://127.0.0.1:{self._rng.randrange(1024, 65536)}"
        if stolen != url and self._signer.is_proof(challenge, proof, stolen):
            self._record.violated(f"the proof of {url} is taken from {stolen}")
        if self._signer.is_proof(self._signer.challenged(url, self._http)[0], proof, url):
            self._record.violated(f"the proof of {url} is taken for another challenge")

    def other_user(self) -> None:
        """Files, sockets and memory of the processes, as another uid."""
        if os.geteuid() != 0:
            return
        self._record.sent("other user", "")
        folders = [self._cluster.secret_file.parent / name for name in ("users", "admin", "secret", "sessions")]
        pids = [process.pid for process in self._cluster.processes().values()]
        for found in intrusions(pids, folders, [self._cluster.members_file]):
            self._record.violated(f"as another user: {found}")

    def _ask(
        self, kind: str, role: str, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        url = self._cluster.urls[role] + path
        self._record.sent(kind, (method, url, headers, body[:200]))
        try:
            given = {"content-type": "application/json"} | headers
            answer = self._http.request(method, url, content=body, headers=given)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            return 0, b""
        canary_is_mine = self._neighbour.canary.encode() in body
        self._record.got(kind, answer.status_code, b"" if canary_is_mine else answer.content)
        return answer.status_code, answer.content


def attack(
    cluster: Cluster, neighbour: Neighbour, record: Record, seed: int, stop: threading.Event
) -> list[threading.Thread]:
    """Start the threads of a hostile local user; each ends after ``stop`` is set."""

    def run(number: int) -> None:
        user = HostileLocal(cluster, neighbour, record, seed * 100 + number)
        while not stop.is_set():
            user.attack()
        for stranger in user._strangers:
            stranger.close()
        user._http.close()

    threads = [threading.Thread(target=run, args=(number,), name=f"local {number}") for number in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads
