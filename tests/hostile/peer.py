"""A hostile peer with the cluster secret: after a valid handshake it says whatever it likes, whenever it likes.

It dials instances, and is dialled by those that a signed request sends to its own bootstrap server; it takes either
side of hand-overs and moves. Whoever has the secret may send requests and KV in anybody's name (``docs/security.md``):
what it sends is mallory's here. It may not end a process, get KV that it did not ask for, or make anybody keep memory.
"""

from __future__ import annotations

import random
import secrets
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import xxhash
from support.control_wire import framed

from pdserve.disaggregation.bootstrap.registration import Registration, decode_registration
from pdserve.disaggregation.errors import LinkLost
from pdserve.disaggregation.handover.control.frames import LENGTH, LONG_FRAME_BYTES, SHORT_FRAME_BYTES
from pdserve.disaggregation.handover.control.port import ControlPort
from pdserve.disaggregation.handover.greeting import digest
from pdserve.messages.base import HandoverId, pack_i32
from pdserve.messages.channel import encode
from pdserve.messages.handover import (
    FirstToken,
    Forecast,
    ForecastRequest,
    Heartbeat,
    Hello,
    Invite,
    RoomQueued,
    TransferDone,
    TransferRequest,
    Welcome,
)
from pdserve.messages.moves import MoveCommit, MoveOffer, MoveReady, MoveTaken
from pdserve.messages.outputs import Timing
from pdserve.runtime.cluster_secret import ClusterSecret

from .cluster import ALICE, Cluster
from .neighbour import Neighbour
from .peer_messages import FAILED, Messages
from .peer_ports import BootstrapPort, DataPort, write_to
from .signed import Signer
from .watch import Record

EPOCHS = 3
"""Instances that one thread stands for: each has one link to an instance, since a second one ends the first."""
REQUESTS_AT_ONCE = 6
HEARTBEAT_SECONDS = 0.2


class Link:
    """A control connection to one instance. ``met``: it has greeted. ``invitation``: how its pool is written."""

    def __init__(self, identity: int, messages: Messages) -> None:
        self.identity, self.messages = identity, messages
        self.met = False
        self.invitation = b""


class HostilePeer:
    """One thread's attacks, by ``seed``."""

    def __init__(self, cluster: Cluster, record: Record, seed: int) -> None:
        self._cluster, self._record = cluster, record
        self._rng = rng = random.Random(seed)
        secret = ClusterSecret.read(str(cluster.secret_file))
        assert secret is not None
        self._control = ControlPort("127.0.0.1", keys=secret.keys("control"))
        self._epochs = [secrets.token_hex(8) for _ in range(EPOCHS)]
        self._rooms: set[int] = set()
        self._registrations = {role: self._registered(port) for role, port in cluster.bootstraps.items()}
        self._data = DataPort(rng, self._registrations["prefill"], self._rooms, record.violated)
        self._bootstrap = BootstrapPort(self._registration, random.Random(seed + 1))
        self._links: dict[int, Link] = {}
        self._signer = Signer(cluster)
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._requests = ThreadPoolExecutor(REQUESTS_AT_ONCE)
        self._open = threading.Semaphore(REQUESTS_AT_ONCE)
        self._beat = 0.0
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self.say, 500),
            (self.contradict, 100),
            (self.offer, 100),
            (self.leg, 100),
            (self.write_pages, 30),
            (self.oversize, 5),
            (self.break_frame, 5),
            (self.greet_again, 5),
            (self.leave, 8),
            (self.moved, 20),
        ]

    def attack(self) -> None:
        """Make one attack, drawn by weight, and read what has come."""
        self._read()
        self._dial()
        (kind,) = self._rng.choices([k for k, _ in self._kinds], [w for _, w in self._kinds])
        kind()
        select.select([self._control], [], [], 0.005)

    def close(self) -> None:
        """Hang up and end what is under way."""
        self._control.close()
        self._data.close()
        self._bootstrap.close()
        self._requests.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    # --- kinds of attacks ---

    def say(self) -> None:
        """A frame of any messages."""
        for link in self._some_links():
            self._send(link, "say", link.messages.payload())

    def contradict(self) -> None:
        """Several messages about one hand-over that can't all be true, in any order, some of them twice."""
        for link in self._some_links():
            room = link.messages.handover()
            many = [link.messages.message() for _ in range(12)]
            about = [msgspec.structs.replace(m, handover=room) for m in many if hasattr(m, "handover")]
            self._send(link, "contradict", encode([*about, *self._rng.sample(about, len(about) // 2)]))

    def offer(self) -> None:
        """A request that goes on there, with KV to be had from here or not; then its commit, more than once."""
        for link in self._some_links():
            made = HandoverId(link.messages.epoch, self._rng.getrandbits(63), 1)
            link.messages.rooms.append(made)
            self._send(link, "offer", encode([link.messages.offer(link.messages.epoch, made)]))
            if self._rng.random() < 0.5:
                self._send(link, "commit", encode([link.messages.commit(link.messages.epoch, made)] * 2))

    def leg(self) -> None:
        """A signed request one leg of which is this peer's."""
        if not self._open.acquire(blocking=False):
            return
        rng, leg = self._rng, self._rng.choice(("prefill", "decode"))
        # The decode is told that the prefill is here; the prefill computes for a decode that is here.
        port = self._bootstrap.port if leg == "decode" else self._cluster.bootstraps["prefill"]
        room, ids = rng.getrandbits(63), [rng.randrange(40_000) for _ in range(rng.choice((1, 16, 40, 300)))]
        self._rooms.add(room)
        params = {"max_new_tokens": rng.choice((1, 4, 40)), "ignore_eos": True, "temperature": 0}
        content = {"input_ids": ids, "sampling_params": params, "stream": rng.random() < 0.5}
        content |= self._signer.bootstrap(port, room, leg) | rng.choice(({}, {"return_logprob": True}))
        self._requests.submit(self._ask, leg, content)
        for link in self._links.values():
            if leg == "prefill" and link.messages.epoch == self._registrations["prefill"].epoch:
                made = HandoverId(link.messages.mine, room, rng.choice((1, 1, 2)))
                link.messages.rooms.append(made)
                link.messages.prompts[room] = (len(ids), xxhash.xxh3_64_intdigest(pack_i32(ids)))
                request = link.messages.transfer_request(link.messages.epoch, made)
                self._send(link, "take", encode([RoomQueued(link.messages.epoch, made), request]))

    def write_pages(self) -> None:
        """Pages by the data port of an instance that has invited this peer."""
        for link in self._links.values():
            if link.invitation:
                self._record.sent("write pages", link.messages.epoch)
                write_to(link.invitation, link.messages.mine, link.messages.handover(), self._rng)
                return

    def oversize(self) -> None:
        """A frame that is longer than peers may send, or as long as they may."""
        for link in self._some_links():
            size = self._rng.choice((SHORT_FRAME_BYTES - 100, SHORT_FRAME_BYTES + 1, 4 << 20, LONG_FRAME_BYTES - 100))
            junk = self._rng.choice((b"\x91", b"\xc6", b"\xdd\x00\xff\xff\xff")) + bytes(size)
            self._send(link, "oversize", self._rng.choice((junk, link.messages.dense(size // 4), junk)))

    def break_frame(self) -> None:
        """Bytes that are not sealed, or a length without its bytes."""
        for link in self._some_links():
            connection = self._control._peers.get(link.identity)
            if connection is not None and connection.greeted:
                data = self._rng.choice((framed(bytes(40)), LENGTH.pack(1 << 31), LENGTH.pack(1 << 19), b"\x00"))
                self._record.sent("break frame", data)
                with suppress(OSError):
                    connection.stream.sock.send(data)

    def greet_again(self) -> None:
        """A second Hello, or one in another's name."""
        for link in self._some_links():
            sender = self._rng.choice((link.messages.mine, *(r.epoch for r in self._registrations.values()), "x"))
            self._send(link, "greet again", encode([self._hello(link.messages.epoch, sender)]))

    def leave(self) -> None:
        """Hang up in the middle; at times all connections at once, and come back as another."""
        all_of_them = self._rng.random() < 0.3
        for link in list(self._links.values()) if all_of_them else self._some_links():
            self._record.sent("leave", link.messages.epoch)
            self._control.drop(link.identity)
            self._links.pop(link.identity, None)
        if all_of_them:
            self._epochs = [secrets.token_hex(8) for _ in range(EPOCHS)]

    def moved(self) -> None:
        """The rest of an answer, by a ticket that was given or made up."""
        rng, role = self._rng, self._rng.choice(sorted(self._cluster.instances))
        key = rng.choice((secrets.token_hex(32), "x" * 64, ""))
        ticket = {"epoch": "x", "host": "127.0.0.1", "port": 1, "key": key, "chars": rng.choice((0, -1, 10**9))}
        self._requests.submit(self._read_moved, role, ticket | {"tokens": 0, "opened": False, "rid": "r", "created": 0})

    # --- how ---

    def _registered(self, port: int) -> Registration:
        answer = httpx.get(f"http://127.0.0.1:{port}/registration", trust_env=False)
        return decode_registration(answer.content)

    def _registration(self) -> Registration:
        """What this peer's bootstrap server tells: another prefill like the real one."""
        real = self._registrations["prefill"]
        epoch = self._epochs[0]
        pool = digest(self._data.offer(epoch))
        return msgspec.structs.replace(real, epoch=epoch, control_port=self._control.port, pool=pool)

    def _hello(self, epoch: str, sender: str) -> Hello:
        real = self._registrations["prefill"]
        metadata = self._data.offer(sender)
        link = self._rng.getrandbits(40) + 1
        return Hello(epoch, sender, link, real.version, real.fingerprint, real.layout, real.backend, metadata)

    def _dial(self) -> None:
        real, mine = self._registrations[self._rng.choice(sorted(self._registrations))], self._rng.choice(self._epochs)
        if any((link.messages.epoch, link.messages.mine) == (real.epoch, mine) for link in self._links.values()):
            return
        identity = self._control.dial("127.0.0.1", real.control_port)
        link = self._links[identity] = self._link(identity, real.epoch, mine)
        self._record.sent("dial", real.epoch)
        self._control.send(identity, [self._hello(real.epoch, mine)])
        link.messages.rooms.append(HandoverId(mine, self._rng.getrandbits(63), 1))

    def _link(self, identity: int, epoch: str, mine: str) -> Link:
        page = self._registrations["prefill"].layout.page_size
        return Link(identity, Messages(self._rng, mine, epoch, page))

    def _some_links(self) -> list[Link]:
        met = [link for link in self._links.values() if link.met]
        return self._rng.sample(met, min(len(met), 1))

    def _send(self, link: Link, kind: str, payload: bytes) -> None:
        connection = self._control._peers.get(link.identity)
        if connection is None or not payload:
            return
        self._record.sent(kind, payload[:300])
        with suppress(LinkLost):  # the next turn reads that it is over
            connection.send([payload])

    def _read(self) -> None:
        for _ in range(200):
            try:
                frame = self._control.recv()
            except Exception as e:  # noqa: BLE001
                # An instance that sends what no instance says is a finding.
                self._record.violated(f"an instance broke the protocol: {e!r}")
                return
            if frame is None:
                break
            for message in frame[1]:
                self._heard(frame[0], message)
        for ended in self._control.take_ended():
            self._links.pop(ended.identity, None)
        if time.monotonic() - self._beat > HEARTBEAT_SECONDS:
            self._beat = time.monotonic()
            for link in self._links.values():
                self._control.send(link.identity, [Heartbeat(link.messages.epoch)])

    def _heard(self, identity: int, message: Any) -> None:
        """Answer as an honest peer would, often enough to get further."""
        rng = self._rng
        link = self._links.get(identity)
        if isinstance(message, Hello):
            if link is None:
                self._control.keep(identity)
                link = self._links[identity] = self._link(identity, message.sender, message.epoch)
                self._control.send(identity, [self._hello(message.sender, message.epoch)])
            link.met = True
            if rng.random() < 0.7:
                metadata = self._data.offer(link.messages.mine)
                self._control.send(identity, [Invite(link.messages.epoch, metadata)])
            return
        if link is None:
            return
        epoch = link.messages.epoch
        if (handover := getattr(message, "handover", None)) is not None:
            link.messages.rooms.append(handover)
        if isinstance(message, Invite):
            link.invitation = message.metadata
            if rng.random() < 0.9:
                self._control.send(identity, [Welcome(epoch)])
        elif isinstance(message, ForecastRequest):
            self._control.send(identity, [Forecast(epoch, message.handover, rng.choice((0.0, 5.0, 1e9)))])
        elif isinstance(message, TransferRequest) and rng.random() < 0.7:
            first = FirstToken(epoch, message.handover, 5, 0, Timing())
            many = [link.messages.first_token(epoch, message.handover), first][rng.random() < 0.7 :]
            done = TransferDone(epoch, message.handover, link.messages.slices(), link.messages.timing())
            self._control.send(identity, [*many, *[done] * rng.choice((0, 1, 1, 2))])
        elif isinstance(message, MoveReady) and rng.random() < 0.7:
            self._control.send(identity, [MoveCommit(epoch, message.handover, b"", 0, 0, 0.0, link.messages.timing())])
        elif isinstance(message, MoveTaken) and rng.random() < 0.7:
            role = next(r for r, found in self._registrations.items() if found.epoch == epoch)
            ticket = {"epoch": epoch, "host": "127.0.0.1", "port": message.port, "key": message.key}
            more = {"chars": 0, "tokens": 0, "opened": False, "rid": "r", "created": 0}
            self._requests.submit(self._read_moved, role, ticket | more)
        elif isinstance(message, MoveOffer) and message.running.request.key_name == ALICE:
            # --return-kv: the attacker's own requests come back, and no others.
            self._record.violated(f"a request of another key was offered: {message.running.request.rid}")

    def _ask(self, leg: str, content: dict[str, Any]) -> None:
        try:
            body = self._signer.body(content)
            url = self._cluster.instances[leg]
            headers = self._signer.headers(self._signer.epoch(url, self._http), "POST", "/generate", body)
            self._record.sent(f"{leg} leg", body[:200])
            answer = self._http.post(url + "/generate", content=body, headers=headers)
            # A hand-over that the peer broke is a 502, and what it says of a failure of its own is the answer's status.
            is_own = answer.status_code == 502 or FAILED.encode() in answer.content
            self._record.got(f"{leg} leg", 200 if is_own else answer.status_code, answer.content)
        except httpx.HTTPError as e:
            self._record.sent(f"{leg} leg", f"no answer: {e!r}")
        finally:
            self._open.release()

    def _read_moved(self, role: str, ticket: dict[str, Any]) -> None:
        with suppress(httpx.HTTPError):
            headers = {"x-pdserve-ticket": msgspec.json.encode(ticket).decode()}
            self._record.sent("moved", ticket)
            body = b'{"text": "x"}'
            answer = self._http.post(self._cluster.instances[role] + "/moved", content=body, headers=headers)
            self._record.got("moved", answer.status_code, answer.content)


THREADS = 2


def attack(
    cluster: Cluster, neighbour: Neighbour, record: Record, seed: int, stop: threading.Event
) -> list[threading.Thread]:
    """Start the threads of hostile peers; each ends after ``stop`` is set."""
    assert cluster.backend == "tcp", "the hostile peer's data port speaks tcp"

    def run(number: int) -> None:
        peer = HostilePeer(cluster, record, seed * 100 + number)
        while not stop.is_set():
            peer.attack()
        peer.close()

    threads = [threading.Thread(target=run, args=(number,), name=f"peer {number}") for number in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads
