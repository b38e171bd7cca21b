"""A hostile peer with the cluster secret: after a valid handshake it sends whatever it likes, whenever it likes.

It dials instances, and is dialled by those that a signed request sends to its own bootstrap server. It takes either
side of hand-overs and moves. A holder of the secret may send requests and KV in any user's name (``docs/security.md``):
what it sends is mallory's here. It may not end a process, get KV that it did not ask for, or make an instance keep
memory. Nor may it see or change the members of a router, which asks for its admin key.

Its connections are in ``peer_links.py``, its ports in ``peer_ports.py``, its messages in ``peer_messages.py`` and its
HTTP requests in ``peer_requests.py`` and ``worker_attacks.py``. Here is what it does with them.
"""

from __future__ import annotations

import random
import secrets
import select
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import xxhash
from support.control_wire import framed
from support.machine import limit

from pdserve.disaggregation.handover.control.frames import LENGTH, LONG_FRAME_BYTES, SHORT_FRAME_BYTES
from pdserve.messages.base import HandoverId, pack_i32
from pdserve.messages.channel import encode
from pdserve.messages.handover import (
    FirstToken,
    Forecast,
    ForecastRequest,
    Invite,
    RoomQueued,
    TransferDone,
    TransferRequest,
    Welcome,
)
from pdserve.messages.moves import MoveCommit, MoveOffer, MoveReady, MoveTaken
from pdserve.messages.outputs import Timing

from .cluster import ALICE, Cluster
from .neighbour import Neighbour
from .peer_links import Link, PeerLinks
from .peer_ports import write_to
from .peer_requests import PeerRequests
from .watch import Record
from .worker_attacks import WorkerAttacks, signed_credentials


class HostilePeer:
    """One thread's attacks, by ``seed``."""

    def __init__(self, cluster: Cluster, record: Record, seed: int) -> None:
        self._cluster, self._record = cluster, record
        self._rng = random.Random(seed)
        self._links = PeerLinks(cluster, record, self._rng, self._hear)
        self._requests = PeerRequests(cluster, record)
        self._http = httpx.Client(timeout=limit(30), trust_env=False)
        workers = WorkerAttacks(cluster, record, self._rng, signed_credentials(cluster, self._rng, self._http))
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
            (workers.attack, 30),
        ]

    def attack(self) -> None:
        """Make one attack, drawn by weight, and read what has come."""
        self._links.read()
        self._links.dial()
        (kind,) = self._rng.choices([k for k, _ in self._kinds], [w for _, w in self._kinds])
        kind()
        select.select([self._links.port], [], [], 0.005)

    def close(self) -> None:
        """Hang up and end what is under way."""
        self._links.close()
        self._requests.close()
        self._http.close()

    # --- kinds of attacks ---

    def say(self) -> None:
        """Send a frame of any messages."""
        for link in self._links.some():
            self._links.send(link, "say", link.messages.payload())

    def contradict(self) -> None:
        """Send several messages about one hand-over that can't all be true, in any order, some of them twice."""
        for link in self._links.some():
            room = link.messages.handover()
            many = [link.messages.message() for _ in range(12)]
            about = [msgspec.structs.replace(m, handover=room) for m in many if hasattr(m, "handover")]
            self._links.send(link, "contradict", encode([*about, *self._rng.sample(about, len(about) // 2)]))

    def offer(self) -> None:
        """Offer a request that moves there, with KV to be had from here or not; then commit it, more than once."""
        for link in self._links.some():
            made = HandoverId(link.messages.epoch, self._rng.getrandbits(63), 1)
            link.messages.rooms.append(made)
            self._links.send(link, "offer", encode([link.messages.offer(link.messages.epoch, made)]))
            if self._rng.random() < 0.5:
                self._links.send(link, "commit", encode([link.messages.commit(link.messages.epoch, made)] * 2))

    def leg(self) -> None:
        """Send a signed request with this peer as one of its legs."""
        if not self._requests.take_place():
            return
        rng, leg = self._rng, self._rng.choice(("prefill", "decode"))
        # The decode is told that the prefill is here; the prefill computes for a decode that is here.
        port = self._links.bootstrap_port if leg == "decode" else self._cluster.bootstraps["prefill"]
        room, ids = rng.getrandbits(63), [rng.randrange(40_000) for _ in range(rng.choice((1, 16, 40, 300)))]
        self._links.rooms.add(room)
        params = {"max_new_tokens": rng.choice((1, 4, 40)), "ignore_eos": True, "temperature": 0}
        content = {"input_ids": ids, "sampling_params": params, "stream": rng.random() < 0.5}
        content |= rng.choice(({}, {"return_logprob": True}))
        self._requests.ask(leg, content, port, room)
        for link in self._links.links.values():
            if leg == "prefill" and link.messages.epoch == self._links.registrations["prefill"].epoch:
                made = HandoverId(link.messages.mine, room, rng.choice((1, 1, 2)))
                link.messages.rooms.append(made)
                link.messages.prompts[room] = (len(ids), xxhash.xxh3_64_intdigest(pack_i32(ids)))
                request = link.messages.transfer_request(link.messages.epoch, made)
                self._links.send(link, "take", encode([RoomQueued(link.messages.epoch, made), request]))

    def write_pages(self) -> None:
        """Write pages to the data port of an instance that has invited this peer."""
        for link in self._links.links.values():
            if link.invitation:
                self._record.sent("write pages", link.messages.epoch)
                write_to(link.invitation, link.messages.mine, link.messages.handover(), self._rng)
                return

    def oversize(self) -> None:
        """Send a frame that is longer than peers may send, or as long as they may."""
        for link in self._links.some():
            size = self._rng.choice((SHORT_FRAME_BYTES - 100, SHORT_FRAME_BYTES + 1, 4 << 20, LONG_FRAME_BYTES - 100))
            junk = self._rng.choice((b"\x91", b"\xc6", b"\xdd\x00\xff\xff\xff")) + bytes(size)
            self._links.send(link, "oversize", self._rng.choice((junk, link.messages.dense(size // 4), junk)))

    def break_frame(self) -> None:
        """Send bytes that are not sealed, or a length without its bytes."""
        for link in self._links.some():
            data = self._rng.choice((framed(bytes(40)), LENGTH.pack(1 << 31), LENGTH.pack(1 << 19), b"\x00"))
            self._links.send_raw(link, "break frame", data)

    def greet_again(self) -> None:
        """Send a second Hello, or one in another's name."""
        for link in self._links.some():
            sender = self._rng.choice((link.messages.mine, *(r.epoch for r in self._links.registrations.values()), "x"))
            self._links.send(link, "greet again", encode([self._links.hello(link.messages.epoch, sender)]))

    def leave(self) -> None:
        """Hang up in the middle; at times all connections at once, and come back as another."""
        all_of_them = self._rng.random() < 0.3
        for link in list(self._links.links.values()) if all_of_them else self._links.some():
            self._links.leave(link)
        if all_of_them:
            self._links.change_epochs()

    def moved(self) -> None:
        """Ask for the rest of an answer, by a real or made-up ticket."""
        rng, role = self._rng, self._rng.choice(sorted(self._cluster.instances))
        key = rng.choice((secrets.token_hex(32), "x" * 64, ""))
        ticket = {"epoch": "x", "host": "127.0.0.1", "port": 1, "key": key, "chars": rng.choice((0, -1, 10**9))}
        self._requests.read_moved(role, ticket | {"tokens": 0, "opened": False, "rid": "r", "created": 0})

    # --- what it answers ---

    def _hear(self, link: Link, message: Any) -> None:
        """Answer as an honest peer would, often enough to get further."""
        rng, port, identity = self._rng, self._links.port, link.identity
        epoch = link.messages.epoch
        if (handover := getattr(message, "handover", None)) is not None:
            link.messages.rooms.append(handover)
        if isinstance(message, Invite):
            link.invitation = message.metadata
            if rng.random() < 0.9:
                port.send(identity, [Welcome(epoch)])
        elif isinstance(message, ForecastRequest):
            port.send(identity, [Forecast(epoch, message.handover, rng.choice((0.0, 5.0, 1e9)))])
        elif isinstance(message, TransferRequest) and rng.random() < 0.7:
            first = FirstToken(epoch, message.handover, 5, 0, Timing())
            many = [link.messages.first_token(epoch, message.handover), first][rng.random() < 0.7 :]
            done = TransferDone(epoch, message.handover, link.messages.slices(), link.messages.timing())
            port.send(identity, [*many, *[done] * rng.choice((0, 1, 1, 2))])
        elif isinstance(message, MoveReady) and rng.random() < 0.7:
            port.send(identity, [MoveCommit(epoch, message.handover, b"", 0, 0, 0.0, link.messages.timing())])
        elif isinstance(message, MoveTaken) and rng.random() < 0.7:
            role = next(r for r, found in self._links.registrations.items() if found.epoch == epoch)
            ticket = {"epoch": epoch, "host": "127.0.0.1", "port": message.port, "key": message.key}
            more = {"chars": 0, "tokens": 0, "opened": False, "rid": "r", "created": 0}
            self._requests.read_moved(role, ticket | more)
        elif isinstance(message, MoveOffer) and message.running.request.key_name == ALICE:
            # --return-kv: the attacker's own requests come back, and no others.
            self._record.violated(f"a request of another key was offered: {message.running.request.rid}")


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
