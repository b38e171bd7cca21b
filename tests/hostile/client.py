"""A hostile client with a user key of its own: generated requests to router and instances, sequences, bombs, probes."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
from support.hostile_http import HostileClient
from support.machine import limit

from .bodies import ODD_NAMES, WORDS, Bodies
from .cluster import ALICE, MALLORY, Cluster
from .neighbour import Neighbour
from .watch import Record

RST = struct.pack("ii", 1, 0)
CROWD = 400
"""Connections of a crowd."""
READ_BYTES = 8 << 20
"""Bytes of one answer that the attacker reads before it hangs up."""
SPARED = ("/docs", "/flush_cache")


def grammar_bomb(rng: random.Random) -> dict[str, Any]:
    """Return a field of structured output that asks for much work. Each is a grammar of its own."""
    number = rng.getrandbits(40)
    nested: dict[str, Any] = {"const": number}
    for i in range(rng.randint(4, 14)):
        nested = {"anyOf": [nested, {"type": "object", "properties": {f"k{i}": nested}}]}
    many = {f"p{i}": {"type": "integer"} for i in range(rng.choice((200, 2000)))}
    patterns = [{"type": "string", "pattern": f"a.*{i}.*{number}"} for i in range(rng.choice((4, 20)))]
    fields: list[dict[str, Any]] = [
        {"json_schema": nested},
        {"json_schema": {"type": "object", "properties": many, "title": number}},
        {"json_schema": {"allOf": patterns}},
        {"json_schema": {"enum": [f"{number} {i}" for i in range(8000)]}},
        {"json_schema": "[" * 100_000},
        {"regex": f"(.*{number % 10}){{200}}" * 20},
        {"regex": f"([ab]*c?|{number}){{1,500}}"},
        {"ebnf": f'root ::= root root | "a" | "" | "{number}"'},
    ]
    return rng.choice(fields)


class HostileUser:
    """One thread's attacks with mallory's key, by ``seed``; ``attack`` makes one."""

    def __init__(self, cluster: Cluster, neighbour: Neighbour, record: Record, seed: int, probes: list[int]) -> None:
        self._cluster, self._neighbour, self._record = cluster, neighbour, record
        self._rng = random.Random(seed)
        self._seed = seed
        self._http = cluster.client(MALLORY)
        page = self._http.get(cluster.instances["decode"] + "/openapi.json").raise_for_status().json()
        self._bodies = Bodies(page, self._rng)
        self._probes = probes
        """The neighbour's questions with prompts that no thread has asked yet."""
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self.generated, 60),
            (self.odd_http, 12),
            (self.sessions, 8),
            (self.stream_left, 8),
            (self.foreign_names, 6),
            (self.bomb, 3),
            (self.half_request, 5),
            (self.crowd, 1),
            (self.large_body, 1),
            (self.probe_cache, 2),
            (self.speak_as, 3),
        ]

    def attack(self) -> None:
        """Make one attack, drawn by weight."""
        (kind,) = self._rng.choices([k for k, _ in self._kinds], [w for _, w in self._kinds])
        kind()

    # --- kinds of attacks ---

    def generated(self) -> None:
        """Send a request that the OpenAPI page describes, or nearly."""
        rng = self._rng
        operation = rng.choice([one for one in self._bodies.operations if one.path not in SPARED])
        method = operation.method if rng.random() < 0.95 else rng.choice(("GET", "POST", "DELETE", "PUT", "HEAD"))
        body = self._bodies.body(operation.schema) if operation.schema is not None else b""
        self._send("generated", method, self._bodies.target(operation), body)

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
        """Start a stream, at times with forks, and leave, abort or move it while it runs."""
        rng, rid = self._rng, f"m{self._rng.randrange(4)}"
        params = {"max_new_tokens": rng.choice((5, 200, 1500)), "ignore_eos": True, "n": rng.choice((1, 1, 4, 64))}
        body = {"text": rng.choice(WORDS) * rng.choice((1, 100)), "stream": True, "rid": rid, "sampling_params": params}
        self._record.sent("stream left", body)
        url = self._url()
        with suppress(httpx.HTTPError), self._http.stream("POST", url + "/generate", json=body) as answer:
            for count, data in enumerate(answer.iter_bytes(), 1):
                self._record.got("stream left", answer.status_code, data)
                if count == rng.choice((1, 3)):
                    break
            self._send("abort", "POST", "/abort_request", json.dumps({"rid": rid}).encode())

    def foreign_names(self) -> None:
        """Orders about requests and things that are not the attacker's."""
        rng, canary = self._rng, self._neighbour.canary
        body, path = rng.choice(
            [
                ({"rid": canary}, "/abort_request"),
                ({"abort_all": True}, "/abort_request"),
                ({"rid": ""}, "/abort_request"),
                ({"rid": "x", "bootstrap_host": "127.0.0.1", "bootstrap_port": 1}, "/migrate"),
                ({"to": ["127.0.0.1:1"]}, "/drain"),
                ({"role": "decode"}, "/role"),
                ({"max_total_tokens": 64}, "/kv/resize"),
                ({"text": canary}, "/kv/hashes"),
                ({}, "/release_memory_occupation"),
                ({"output_dir": "../x"}, "/start_profile"),
                ({}, "/stop_profile"),
                ({}, "/flush_cache"),
            ]
        )
        status, answer = self._send("foreign names", "POST", path, json.dumps(body).encode(), judged=False)
        if path != "/abort_request" and status == 200:
            self._record.violated(f"foreign names: {path} obeyed a user: {answer[:300]!r}")

    def bomb(self) -> None:
        """Send few bytes that ask for much work or output."""
        rng = self._rng
        many = {"max_new_tokens": 1500, "n": 64, "ignore_eos": True}
        bodies: list[tuple[str, dict[str, Any]]] = [
            (
                "/generate",
                {"text": "a " * 1500, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128},
            ),
            ("/generate", {"text": ["a " * 200] * 200, "sampling_params": {"max_new_tokens": 1, "n": 64}}),
            ("/generate", {"text": "a", "sampling_params": many, "return_logprob": True, "top_logprobs_num": 20}),
            ("/generate", {"text": "b", "sampling_params": many | {"logit_bias": {str(i): 1.0 for i in range(1024)}}}),
            ("/v1/completions", {"prompt": "a " * 1500, "logprobs": 20, "echo": True, "max_tokens": 1}),
            ("/tokenize", {"prompt": "a b " * 250_000}),
            ("/detokenize", {"tokens": [7] * 130_000}),
            ("/generate", {"input_ids": [[5]] * 4096, "sampling_params": {"max_new_tokens": 1}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 16_000, "max_tokens": 1}),
            ("/generate", {"text": "c", "sampling_params": {"max_new_tokens": 400, **grammar_bomb(rng)}}),
        ]
        path, body = rng.choice(bodies)
        self._send("bomb", "POST", path, json.dumps(body).encode(), leave=rng.random() < 0.5)

    def half_request(self) -> None:
        """Send a part of a request, and then silence, a reset or an end."""
        rng = self._rng
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._cluster.keys[MALLORY]}\r\n"
        length = rng.choice((10, 1 << 20, 33 << 20))
        data = f"{head}content-length: {length}\r\n\r\n".encode() + b'{"text": "' + b"x" * rng.choice((0, 100, 1 << 20))
        self._record.sent("half request", data[:300])
        with suppress(OSError), self._connected() as sock:
            sock.sendall(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
            if rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            else:
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(2)
                self._record.seen("half request", sock.recv(1 << 16))

    def crowd(self) -> None:
        """Open many connections at once that send nothing, or half a head."""
        self._record.sent("crowd", CROWD)
        socks: list[socket.socket] = []
        with suppress(OSError):
            for i in range(CROWD):
                socks.append(self._connected())
                if i % 2:
                    socks[-1].sendall(b"GET /livez HTTP/1.1\r\nx: " + b"y" * 30_000)
        for sock in socks:
            sock.close()

    def large_body(self) -> None:
        """Send a body near the limit that is cheap to send and expensive to parse."""
        size = self._rng.choice((1 << 20, 8 << 20, 31 << 20, 34 << 20))
        kind = self._rng.choice((b'{"text": "%b"}', b'{"input_ids": [%b1]}', b'{"a": [%b1]}', b'{"text": [%b"a"]}'))
        unit = b"1," if b"[%b1]" in kind else b'"a",' if b"[" in kind else b"x"
        self._send("large body", "POST", "/generate", kind % (unit * (size // len(unit))))

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

    # --- how ---

    def _url(self) -> str:
        urls = self._cluster.urls
        return urls[self._rng.choice(("router", "router", *sorted(urls)))]

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self._url().rpartition(":")[2])), 10)

    def _send(
        self,
        kind: str,
        method: str,
        path: str,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        leave: bool = False,
        judged: bool = True,
    ) -> tuple[int, bytes]:
        """Send it to the router or an instance; returns status and answer, status 0 where none came."""
        url = self._url() + path
        self._record.sent(kind, (method, url, body[:500]))
        answer = b""
        try:
            with self._http.stream(
                method, url, content=body, headers={"content-type": "application/json"} | (headers or {})
            ) as response:
                for data in response.iter_raw():
                    answer += data
                    if leave or len(answer) > READ_BYTES:
                        break
                lines = repr(response.headers.raw).encode()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            return 0, b""
        self._record.got(kind, response.status_code, answer if judged else b"", lines)
        return response.status_code, answer


THREADS = 5


def attack(
    cluster: Cluster, neighbour: Neighbour, record: Record, seed: int, stop: threading.Event
) -> list[threading.Thread]:
    """Start the threads of a hostile client; each ends after ``stop`` is set."""
    probes = list(range(len(neighbour.questions)))

    def run(number: int) -> None:
        user = HostileUser(cluster, neighbour, record, seed * 100 + number, probes)
        while not stop.is_set():
            user.attack()
        user._http.close()

    threads = [threading.Thread(target=run, args=(number,), name=f"client {number}") for number in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def clean_up(cluster: Cluster) -> None:
    """Delete the attacker's sessions."""
    with cluster.client(MALLORY) as client:
        for session in client.get(cluster.url + "/kv/sessions").raise_for_status().json().get("sessions", []):
            client.delete(f"{cluster.url}/kv/sessions/{session['name']}")
