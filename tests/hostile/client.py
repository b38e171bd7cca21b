"""A hostile client with a user key of its own: generated requests to router and instances, sequences, bombs, probes."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from support.hostile_http import HostileClient
from support.machine import limit

from pdserve.runtime.web.paths import PathFacts

from .bodies import ODD_NAMES, WORDS, Bodies
from .bombs import bomb
from .cluster import ALICE, MALLORY, Cluster
from .distortions import Distortions
from .kept_responses import KeptResponseAttacks
from .neighbour import Neighbour
from .sender import Sender, read_all, read_none
from .sound import FORBIDDEN, FORBIDDEN_PATHS, STREAMED, USER_PATHS, Known, sound_request
from .watch import Record
from .worker_attacks import WorkerAttacks, user_credentials

CROWD = 400
"""Connections of a crowd."""
SPARED = ("/docs", "/flush_cache")
POSTED = tuple(facts for facts in USER_PATHS if "POST" in facts.methods)
GENERATING = tuple(facts for facts in USER_PATHS if facts.label in STREAMED)
LARGE_BODIES = (
    *(b'{"text": "%b"}', b'{"input_ids": [%b1]}', b'{"a": [%b1]}', b'{"text": [%b"a"]}', b'{"input": "%b"}'),
    *(b'{"input": [%b1]}', b'{"messages": [%b1]}', b'{"messages": [%b"a"]}', b'{"prompt": "%b"}', b'{"tools": [%b1]}'),
)
"""Bodies of one field with room for many values or characters."""


class HostileUser:
    """One thread's attacks with mallory's key, by ``seed``; ``attack`` makes one."""

    def __init__(
        self,
        cluster: Cluster,
        neighbour: Neighbour,
        record: Record,
        seed: int,
        probes: list[int],
        known: Known,
    ) -> None:
        self._cluster, self._neighbour, self._record, self._known = cluster, neighbour, record, known
        self._rng = random.Random(seed)
        self._sender = Sender(cluster, record, self._rng)
        self._send = self._sender.send
        page = self._sender.http.get(cluster.instances["decode"] + "/openapi.json").raise_for_status().json()
        self._bodies, self._distortions = Bodies(page, self._rng), Distortions(self._rng)
        self._probes = probes
        """The neighbour's questions with prompts that no thread has asked yet."""
        workers = WorkerAttacks(cluster, record, self._rng, user_credentials(cluster, self._rng))
        self._deck: list[PathFacts] = []
        """Paths that are left of the present round. A round attacks each path at least once."""
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self.generated, 40),
            (self.nearly_sound, 60),
            (self.odd_http, 12),
            (self.sessions, 8),
            (self.stream_left, 12),
            (self.foreign_names, 6),
            (self.bomb, 6),
            (self.half_request, 5),
            (self.crowd, 1),
            (self.large_body, 1),
            (self.probe_cache, 2),
            (self.speak_as, 3),
            (workers.attack, 15),
            *KeptResponseAttacks(self._sender, neighbour, record, known, self._rng).kinds,
        ]

    def attack(self) -> None:
        """Make one attack, drawn by weight."""
        (kind,) = self._rng.choices([k for k, _ in self._kinds], [w for _, w in self._kinds])
        kind()

    def close(self) -> None:
        """Delete the responses that are known, and close all connections."""
        with suppress(IndexError):
            while True:
                server, response_id = self._known.responses.pop()
                self._send("clean up", "DELETE", f"/v1/responses/{quote(response_id, safe='')}", url=server)
        self._sender.close()

    # --- kinds of attacks ---

    def generated(self) -> None:
        """Send a request that the OpenAPI page describes, or nearly."""
        rng = self._rng
        operation = rng.choice([one for one in self._bodies.operations if one.path not in SPARED])
        method = operation.method if rng.random() < 0.95 else rng.choice(("GET", "POST", "DELETE", "PUT", "HEAD"))
        body = self._bodies.body(operation.schema) if operation.schema is not None else b""
        self._send("generated", method, self._bodies.target(operation), body)

    def nearly_sound(self) -> None:
        """Send a request that its handler accepts, or one with one thing wrong."""
        rng = self._rng
        if not self._deck:
            self._deck = [*USER_PATHS, *POSTED, *POSTED]
            rng.shuffle(self._deck)
        request, url = sound_request(self._deck.pop(), rng, self._known), self._sender.url()
        body = b""
        if request.body is not None:
            wrong = rng.random() < 0.55
            body = self._distortions.distorted(request.body) if wrong else json.dumps(request.body).encode()
        reads = read_none if rng.random() < 0.05 else read_all
        status, answer = self._send("nearly sound", request.method, request.path, body, url=url, reads=reads)
        if status == 200 and request.label == "/v1/responses":
            self._known.note(url, answer)

    def odd_http(self) -> None:
        """Broken HTTP with a good key."""
        role = self._rng.choice(sorted(self._cluster.urls))
        port = int(self._cluster.urls[role].rpartition(":")[2])
        key = b"authorization: Bearer " + self._cluster.keys[MALLORY].encode()
        hostile = HostileClient(port, self._rng.getrandbits(32), limit(60.0), headers=(key,))
        self._record.sent("odd http", role)
        try:
            hostile.run(3, lambda: None)
        except AssertionError as e:
            self._record.violated(f"odd http at {role}: {e}")
        self._record.statuses.update({str(status): count for status, count in hostile.statuses.items()})

    def sessions(self) -> None:
        """Snapshot, restore and delete, by names that may be another's."""
        rng = self._rng
        name = rng.choice((*WORDS, *ODD_NAMES, f"m{rng.randrange(5)}", self._neighbour.canary + "-session"))
        of = {"text": rng.choice(WORDS)} if rng.random() < 0.7 else {"rid": rng.choice(("m1", "m2", "nobody"))}
        steps: list[tuple[str, str, Any]] = [
            ("POST", "/kv/snapshot", {"name": name} | of),
            ("POST", "/kv/restore", {"name": name, "sampling_params": {"max_new_tokens": 4}}),
            ("POST", "/slots/0?action=save", {"filename": name}),
            ("POST", "/slots/0?action=restore", {"filename": name}),
            ("POST", "/slots/0?action=erase", None),
            ("GET", "/kv/sessions", None),
            ("DELETE", "/kv/sessions/" + name.encode(errors="replace").hex(), None),
            ("DELETE", f"/kv/sessions/m{rng.randrange(5)}", None),
            ("DELETE", f"/kv/sessions/m{rng.randrange(5)}?owner={ALICE}", None),
        ]
        # The name is the attacker's own word here: an answer may repeat it. A session of its own may not have it.
        names_it = name.startswith(self._neighbour.canary)
        steps = [step for step in steps if not (names_it and step[1] in ("/kv/snapshot", "/slots/0?action=save"))]
        for method, path, content in rng.sample(steps, rng.randrange(1, 5)):
            body = json.dumps(content).encode() if content is not None else b""
            status, answer = self._send("sessions", method, path, body, judged=not names_it)
            if names_it and path == "/kv/restore" and status == 200:
                self._record.violated(f"another's session was restored: {answer[:300]!r}")

    def stream_left(self) -> None:
        """Start a stream of any API, at times with forks, and leave or abort it, or both, while it runs."""
        rng, rid = self._rng, f"m{self._rng.randrange(4)}"
        request = sound_request(rng.choice(GENERATING), rng, self._known).limited(rng.choice((5, 200, 1500)))
        body: dict[str, Any] = {**(request.body or {}), "stream": True, "rid": rid}
        if request.label == "/generate":
            params = body["sampling_params"] | {"ignore_eos": True, "n": rng.choice((1, 1, 4, 64))}
            body |= {"text": rng.choice(WORDS) * rng.choice((1, 100)), "sampling_params": params}
        url, left = self._sender.url(), rng.choice((1, 3, 1000))
        abort = json.dumps({"rid": rid}).encode()
        aborts_at = rng.choice((0, left - 1))

        def reads(answer: bytes) -> bool:
            nonlocal left
            if left == aborts_at:
                self._send("abort", "POST", "/abort_request", abort, url=url)
            left -= 1
            return left > 0

        self._send("stream left", "POST", request.path, json.dumps(body).encode(), url=url, reads=reads)

    def foreign_names(self) -> None:
        """Orders about requests and things that are not the attacker's."""
        rng, canary = self._rng, self._neighbour.canary
        if rng.random() < 0.3:
            body = rng.choice(({"rid": canary}, {"abort_all": True}, {"rid": ""}))
            self._send("foreign names", "POST", "/abort_request", json.dumps(body).encode(), judged=False)
            return
        facts = rng.choice(FORBIDDEN_PATHS)
        (method,), order = facts.methods, FORBIDDEN[facts.label]
        data = json.dumps(order).encode() if order is not None else b""
        status, answer = self._send("foreign names", method, facts.path, data, judged=False)
        if status == 200:
            self._record.violated(f"foreign names: {facts.path} obeyed a user: {answer[:300]!r}")

    def bomb(self) -> None:
        """Send few bytes that ask for much work or output."""
        path, body = bomb(self._rng)
        reads = read_none if self._rng.random() < 0.5 else read_all
        self._send("bomb", "POST", path, json.dumps(body).encode(), reads=reads)

    def half_request(self) -> None:
        """Send a part of a request, and then a reset or an end."""
        rng = self._rng
        request = sound_request(rng.choice(POSTED), rng, self._known)
        whole = json.dumps(request.body).encode()
        body = whole[: rng.randrange(len(whole))] + b"x" * rng.choice((0, 100, 1 << 20))
        self._sender.send_part(
            "half request", request.path, body, rng.choice((10, 1 << 20, 33 << 20)), resets=rng.random() < 0.5
        )

    def crowd(self) -> None:
        """Open many connections at once that send nothing, or half a head."""
        self._record.sent("crowd", CROWD)
        socks: list[socket.socket] = []
        with suppress(OSError):
            for i in range(CROWD):
                socks.append(self._sender.connected(self._sender.url()))
                if i % 2:
                    socks[-1].sendall(b"GET /livez HTTP/1.1\r\nx: " + b"y" * 30_000)
        for sock in socks:
            sock.close()

    def large_body(self) -> None:
        """Send a body near the limit that is cheap to send and expensive to parse."""
        rng = self._rng
        size, kind = rng.choice((1 << 20, 8 << 20, 31 << 20, 34 << 20)), rng.choice(LARGE_BODIES)
        unit = b"1," if b"[%b1]" in kind else b'"a",' if b"[" in kind else b"x"
        path = sound_request(rng.choice(POSTED), rng, self._known).path
        self._send("large body", "POST", path, kind % (unit * (size // len(unit))))

    def probe_cache(self) -> None:
        """Send the neighbour's own prompt: the answer must not show that it is cached."""
        with suppress(IndexError):
            question = self._neighbour.questions[self._probes.pop()]
            key = self._rng.choice((ALICE, f"{ALICE}\0", f"\0{ALICE}", f"key:{ALICE}", "", None))
            body = {"input_ids": question.ids, "extra_key": key, "sampling_params": {"max_new_tokens": 1}}
            # Ids that the attacker sent itself may come back.
            status, answer = self._send("probe", "POST", "/generate", json.dumps(body).encode(), judged=False)
            cached = json.loads(answer)["meta_info"]["cached_tokens"] if status == 200 else 0
            if cached:
                self._record.violated(f"the neighbour's prompt was cached for another key: {cached} tokens")

    def speak_as(self) -> None:
        """Send the headers by which routers speak to instances."""
        rng = self._rng
        headers = rng.choice(
            [
                {"x-pdserve-key-name": ALICE},
                {"x-pdserve-key-name": "(admin)"},
                {"x-pdserve-signature": "1.2.3.4"},
                {"x-pdserve-follow": "1"},
                {"x-pdserve-ticket": json.dumps({"epoch": "x", "host": "127.0.0.1", "port": 1, "key": "x" * 64})},
                {"x-pdserve-challenge": "0" * 32},
                {"x-forwarded-for": "1.2.3.4\t" + "A" * 500},
            ]
        )
        path = rng.choice(("/kv/sessions", "/server_info", "/transfers", "/metrics", "/livez", "/moved"))
        self._send("speak as", "POST" if path == "/moved" else "GET", path, b"", headers=headers)


THREADS = 5


def attack(
    cluster: Cluster, neighbour: Neighbour, record: Record, seed: int, stop: threading.Event
) -> list[threading.Thread]:
    """Start the threads of a hostile client; each ends after ``stop`` is set."""
    probes = list(range(len(neighbour.questions)))

    known = Known()

    def run(number: int) -> None:
        user = HostileUser(cluster, neighbour, record, seed * 100 + number, probes, known)
        while not stop.is_set():
            user.attack()
        user.close()

    threads = [threading.Thread(target=run, args=(number,), name=f"client {number}") for number in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def clean_up(cluster: Cluster) -> None:
    """Delete the attacker's sessions."""
    with cluster.client(MALLORY) as client:
        for session in client.get(cluster.url + "/kv/sessions").raise_for_status().json().get("sessions", []):
            client.delete(f"{cluster.url}/kv/sessions/{session['name']}")
