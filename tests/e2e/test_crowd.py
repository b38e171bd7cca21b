"""What a crowd does to a pair: while it does, health stays 200, chats go on, and memory comes back.

Each attack runs beside streams through the router and beside health requests to all processes.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from support.machine import limit
from support.processes import Launched, Pair, pd_pair, wait_until

MIB = 2**20
BODY_LIMIT = 32 * MIB
FRONTS = ("router", "http", "tokenizer", "scheduler", "detokenizer")
MAX_FIRST_GROWTH, MAX_GROWTH = 96 * MIB, 32 * MIB
"""Growth of all processes together after an attack, and after the same attack again. Allocators keep some.

Cached prefixes are dropped first: 4,096 prompts take 17 MiB of tree in each scheduler, which the pages allow.
"""
MAX_GAP = 3.0
"""Seconds between two tokens of a stream, or that a question about health may take; on a machine without load, 0.1."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_args) -> Iterator[Pair]:
    with pd_pair(tmp_path_factory.mktemp("pair"), "tcp", *tiny_args, "--max-queued-requests", "8192") as pair:
        # The first requests import modules and start threads, which is no memory of an attack.
        for text in ("One prompt.", ["Two", "prompts."]):
            body = {"text": text, "sampling_params": {"max_new_tokens": 2}}
            assert pair.router.client.post(pair.router.url + "/generate", json=body).status_code == 200
        yield pair
        pair.assert_all_returned()


def memory(pair: Pair) -> int:
    """Return the bytes of the processes that handle clients' text."""
    families = [server.family() for server in (pair.prefill, pair.decode)]
    processes = [process for family in families for name, process in family.items() if name in FRONTS]
    return sum(process.memory_info().rss for process in [*processes, psutil.Process(pair.router.process.pid)])


def idle_memory(pair: Pair) -> int:
    """Return ``memory`` without cached prefixes, once no request runs: an instance flushes only then."""
    wait_until(lambda: pair.router.client.post(pair.router.url + "/flush_cache").status_code == 200, 20, "a flush")
    return memory(pair)


class Watch:
    """Streams and health checks, until the block ends; what went wrong with them.

    ``may_queue``: a stream may wait for its first token, behind the requests of the crowd.
    """

    def __init__(self, pair: Pair, *, may_queue: bool = False) -> None:
        self._pair = pair
        self._may_queue = may_queue
        self._over = threading.Event()
        self.wrong: list[str] = []
        self.gaps: list[tuple[float, float]] = []
        self.waits: list[float] = []
        """Seconds from a request to its first token, where it may queue."""
        self.tokens = 0
        self.checks = 0

    def __enter__(self) -> Watch:
        jobs = [self._chat, *(partial(self._ask, server) for server in vars(self._pair).values())]
        self._threads = [threading.Thread(target=self._run, args=(job,)) for job in jobs]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.tokens and self.checks, 30, "a stream and a check")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(limit(300 if self._may_queue else 60))
            assert not thread.is_alive()

    def _run(self, job: Callable[[], None]) -> None:
        """Run one thread's job. If it dies, the test must fail: it would watch nothing from then on."""
        try:
            job()
        except Exception as error:  # noqa: BLE001  Whatever it is, it ends the watch.
            self.wrong.append(f"a watching thread died: {error!r}")

    def _ask(self, server: Launched) -> None:
        with httpx.Client(base_url=server.url, timeout=limit(60), trust_env=False) as client:
            while not self._over.wait(0.05):
                asked_at = time.monotonic()
                status = client.get("/health").status_code
                took = time.monotonic() - asked_at
                self.checks += 1
                if status != 200 or took > limit(MAX_GAP):
                    self.wrong.append(f"{server.args[0]} {server.url}: /health said {status} after {took:.1f} s")

    def _chat(self) -> None:
        body = {"input_ids": [1, 2, 3], "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        seconds = limit(300 if self._may_queue else 60)
        with httpx.Client(base_url=self._pair.router.url, timeout=seconds, trust_env=False) as client:
            while not self._over.is_set():
                last, is_first = time.monotonic(), True
                with client.stream("POST", "/generate", json=body) as answer:
                    if answer.status_code != 200:
                        self.wrong.append(f"a stream: {answer.status_code} {answer.read()[:200]!r}")
                        continue
                    for line in answer.iter_lines():
                        if not line.startswith("data: "):
                            continue
                        gap, last = time.monotonic() - last, time.monotonic()
                        self.tokens += 1
                        if is_first and self._may_queue:
                            is_first = False
                            self.waits.append(gap)
                            continue
                        self.gaps.append((last, gap))
                        if '"error"' in line:
                            self.wrong.append(f"a stream: {line[:200]}")
                        if gap > limit(MAX_GAP):
                            self.wrong.append(f"a stream was silent for {gap:.1f} s")


def attacked(pair: Pair, attack: Callable[[Pair], None]) -> None:
    """Twice, the second time under watch. What the first one takes for good is little, and the second takes no more."""
    before = idle_memory(pair)
    attack(pair)
    wait_until(lambda: idle_memory(pair) - before < MAX_FIRST_GROWTH, 20, "memory is back", every=0.5)
    before = idle_memory(pair)
    with Watch(pair) as watch:
        attack(pair)
    assert not watch.wrong, "\n".join(watch.wrong[:10])
    wait_until(lambda: idle_memory(pair) - before < MAX_GROWTH, 20, "memory is back again", every=0.5)


def test_a_batch_of_4096_prompts(pair: Pair) -> None:
    def attack(pair: Pair) -> None:
        texts = [f"Prompt number {i} of a batch that is as long as it may be, and says so." for i in range(4096)]
        answer = pair.router.client.post(
            pair.router.url + "/generate",
            json={"text": texts, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}},
            timeout=limit(300),
        )
        assert answer.status_code == 200, answer.text[:500]
        assert len(answer.json()) == len(texts)

    attacked(pair, attack)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b'{"' + b"a" * (BODY_LIMIT - 10) + b'":1}', 400, id="a-name-of-32-mib"),
        pytest.param(b'{"text":' + b"[" * 1000 + b"]" * 1000 + b"}", 400, id="1000-brackets"),
        pytest.param(b'{"a":' * 1000 + b"1" + b"}" * 1000, 400, id="1000-braces"),
        pytest.param(b'{"metadata":[' + b"{}," * (BODY_LIMIT // 3 - 20) + b"{}]}", 413, id="11-million-objects"),
        pytest.param(b'{"metadata":[' + b"{}," * (2**20 - 5) + b'{}],"text":"a"}', 413, id="1-million-objects"),
        pytest.param(b'{"input_ids":[' + b"1," * (BODY_LIMIT // 2 - 20) + b"1]}", 413, id="16-million-ids"),
        pytest.param(b'{"input_ids":[' + b"1," * 2**22 + b"1]}", 413, id="4-million-ids"),
        pytest.param(json.dumps({"text": "a " * (BODY_LIMIT // 2 - 20)}).encode(), 400, id="a-text-of-32-mib"),
        pytest.param(b'{"text":"a","' + b'","'.join(b"%d" % i for i in range(10)) + b'":1}', 400, id="no-json"),
    ],
)
def test_a_body_that_is_too_much(pair: Pair, body: bytes, status: int) -> None:
    def attack(pair: Pair) -> None:
        for server in (pair.router, pair.decode):
            answer = server.client.post(server.url + "/generate", content=body, timeout=limit(60))
            assert answer.status_code == status, answer.text[:500]
            assert len(answer.content) < 2000

    attacked(pair, attack)


@contextmanager
def uploads(server: Launched, count: int, size: int) -> Iterator[list[socket.socket]]:
    """Open requests that announce 32 MiB, send ``size`` bytes, and no more."""
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY_LIMIT}\r\n\r\n".encode()
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), limit(10)))
            connection.sendall(head)
            connections.append(connection)
        for connection in connections:
            connection.setblocking(False)
        left = dict.fromkeys(connections, size)
        part = b" " * 65536
        deadline = time.monotonic() + limit(60)
        while left and time.monotonic() < deadline:
            for connection in list(left):
                try:
                    left[connection] -= connection.send(part[: left[connection]])
                except BlockingIOError:
                    continue
                except OSError:
                    left[connection] = 0  # the server ended it
                if not left[connection]:
                    del left[connection]
        yield connections


@pytest.mark.parametrize("front", ["router", "decode"])
@pytest.mark.parametrize("size", [1, 2 * MIB], ids=["a-byte", "2-mib"])
def test_500_idle_uploads(pair: Pair, front: str, size: int) -> None:
    server = getattr(pair, front)

    def attack(pair: Pair) -> None:
        before = memory(pair)
        with uploads(server, 500, size):
            # What is held while they stay: of 1,000 MiB, the 256 that are allowed.
            assert memory(pair) - before < 450 * MIB
            whole = {"text": "a" * MIB, "sampling_params": {"max_new_tokens": 1}}
            assert server.post("/generate", whole).status_code == 400  # longer than the context, and read all the same
            assert server.generate(text="a", sampling_params={"max_new_tokens": 2})["text"]

    attacked(pair, attack)


def test_readers_that_do_not_read(pair: Pair) -> None:
    body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n".encode()

    def attack(pair: Pair) -> None:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", pair.router.port), limit(10)))
                for _ in range(20)
            ]
            for connection in connections:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(head + content)
            # They end at the engine's own pace: it does not wait for a client that doesn't read.
            wait_until(lambda: pair.decode.info()["requests"]["total"] > 10, 30, "they run", every=0.2)
            wait_until(lambda: pair.decode.info()["requests"]["total"] <= 2, 300, "they have ended", every=0.5)

    attacked(pair, attack)


ESTABLISHED = "01"
"""A connection's state in /proc/net/tcp."""
LONG_TOKEN = 39910
"""76 number signs, in the tokenizer of the tests."""


def clients_of(port: int) -> set[int]:
    """Return the ports of the clients that are connected to the server at ``port``."""
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    ends = ((local, remote) for _, local, remote, state, *_ in rows if state == ESTABLISHED)
    return {int(remote[-4:], 16) for local, remote in ends if int(local[-4:], 16) == port}


class NonReaders:
    """Clients that ask for streams, read nothing of them, and come again when they are disconnected.

    Disconnected means that the server has closed its end. A client that does not read may not learn of that: when the
    kernel gives up a connection by TCP_USER_TIMEOUT, it sends no reset.
    """

    BODY = json.dumps(
        # Each event holds everything so far, and each token 76 characters: few tokens make more than buffers hold.
        {"input_ids": [1], "stream": True, "incremental": False}
        | {"sampling_params": {"max_new_tokens": 120, "ignore_eos": True, "logit_bias": {str(LONG_TOKEN): 100}}}
    ).encode()

    def __init__(self, port: int, count: int) -> None:
        self._address = ("127.0.0.1", port)
        self._sockets: dict[int, socket.socket] = {}
        self._count = count
        self.disconnected = 0

    def renew(self) -> None:
        """Replace those that were disconnected."""
        for port in self._sockets.keys() - clients_of(self._address[1]):
            self._sockets.pop(port).close()
            self.disconnected += 1
        while len(self._sockets) < self._count:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(limit(10))
            sock.connect(self._address)
            head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(self.BODY)}\r\n\r\n".encode()
            sock.sendall(head + self.BODY)
            self._sockets[sock.getsockname()[1]] = sock

    def close(self) -> None:
        for sock in self._sockets.values():
            with suppress(OSError):
                sock.close()


@pytest.mark.parametrize(("clients", "seconds"), [(1000, 300)])
def test_clients_that_never_read(pair: Pair, clients: int, seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Health stays 200, memory is flat once all have been there, and other streams go on as before.

    For ``seconds``, and until each client was disconnected twice: how long the engine takes for all their requests
    depends on the machine.
    """
    with Watch(pair, may_queue=True) as before:
        wait_until(lambda: len(before.gaps) > 2000, 60, "a measure of the gaps", every=0.5)
    readers, used = NonReaders(pair.router.port, clients), []
    try:
        with Watch(pair, may_queue=True) as during:
            started = time.monotonic()
            while (passed := time.monotonic() - started) < seconds or readers.disconnected < 2 * clients:
                assert passed < limit(seconds), f"{readers.disconnected} disconnected within {passed:.0f} s"
                readers.renew()
                used.append((readers.disconnected, memory(pair)))
                time.sleep(1)
    finally:
        readers.close()
    starts = range(0, int(passed), 20)
    parts = [[gap for at, gap in during.gaps if start <= at - started < start + 20] for start in starts]
    reported = [
        f"{w.tokens} tokens, first after {max(w.waits):.1f} s at most, gaps of {_gaps([gap for _, gap in w.gaps])}"
        for w in (before, during)
    ]
    # What they left in memory is what the first of them did.
    settled = [size for disconnected, size in used if disconnected >= clients]
    middle, last = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    growth = statistics.mean(last) - statistics.mean(middle)
    with capsys.disabled():
        print(f"\nbefore: {reported[0]}\nduring: {reported[1]}; {during.checks} checks of health")
        print(f"{readers.disconnected} disconnected; each 20 s: gaps, their median (ms), memory (MiB)")
        print([len(part) for part in parts])
        print([round(1000 * statistics.median(part), 1) if part else None for part in parts])
        print([size // MIB for _, size in used[::20]], f"growth {growth / MIB:.1f} MiB")
    assert not before.wrong + during.wrong, "\n".join((before.wrong + during.wrong)[:10])
    assert growth < MAX_GROWTH
    wait_until(lambda: pair.decode.info()["requests"]["total"] == 0, 120, "their requests have ended", every=0.5)


def _gaps(gaps: list[float]) -> str:
    middle, p99, longest = statistics.median(gaps), statistics.quantiles(gaps, n=100)[98], max(gaps)
    return f"{1000 * middle:.1f} ms in the middle, p99 {1000 * p99:.1f} ms, longest {1000 * longest:.0f} ms"
