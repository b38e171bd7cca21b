"""Processes with Mooncake engines over one shared pool, which the proofs kill, freeze, restart and watch.

The receiver's memory is shared with the proof itself, so what lands in it is seen without asking the receiver: one byte
in every 4 KiB is sampled about once a millisecond, and each write carries a stamp of its own.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PAGE, PAGES = 64 * 1024, 1024
SPAN = PAGE * PAGES
# Without the connection pool each page costs a connection of its own, so every item but the speed test turns it on.
ENV = {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_LOG_LEVEL": "ERROR"}
# What a write returned, when it began and ended (monotonic), and the CPU seconds that it took.
Call = tuple[int, float, float, float]
Target = tuple[str, int]  # the session and the address of the pool in its process


def row(item: str, question: str, finding: str) -> None:
    print(f"| {item} | {question} | {finding} |", flush=True)


def spread(values: list[float], unit: str = "ms") -> str:
    return f"median {median(values):.1f}, max {max(values):.1f} {unit} (n={len(values)})"


def run(items: dict[str, Callable[[], None]]) -> None:
    os.environ.update(ENV)
    print("| item | what | found |\n|---|---|---|")
    for name in sys.argv[1:] or items:
        began = time.monotonic()
        items[name]()
        print(f"item {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)


class Side:
    """The engines of one process over one pool, by name. Its methods are the verbs that an Actor answers to."""

    def __init__(self, pool: SharedMemory) -> None:
        self.memory, self.pool = pool, np.ndarray(SPAN, np.uint8, buffer=pool.buf)
        self.source = np.zeros(SPAN, np.uint8)
        self.order = np.random.default_rng(7).permutation(PAGES)
        self.engines: dict[str, Any] = {}

    def open(self, name: str = "main", hurry: bool = False) -> tuple[str, int]:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("no engine")
        if any(engine.register_memory(array.ctypes.data, SPAN) for array in (self.pool, self.source)):
            raise RuntimeError("memory refused")
        self.engines[name] = engine
        if hurry:
            shorten_accept(engine.get_rpc_port())
        return f"127.0.0.1:{engine.get_rpc_port()}", self.pool.ctypes.data

    def close(self, name: str = "main") -> tuple[float, float, float]:
        """Destroy an engine. Returns when that began and ended, and the longest time another thread had to wait."""
        with ticking() as gap:
            start = time.monotonic()
            del self.engines[name]
            gc.collect()
            end = time.monotonic()
        return start, end, gap[0]

    def unregister(self, name: str = "main") -> tuple[float, float, float]:
        start = time.monotonic()
        self.engines[name].unregister_memory(self.pool.ctypes.data)
        return start, time.monotonic(), 0.0

    def fill(self, stamp: int) -> None:
        self.source.fill(stamp)

    def lists(self, there: int, first: int, count: int) -> tuple[list[int], list[int], list[int]]:
        order = self.order[(self.order >= first) & (self.order < first + count)]
        here = [self.source.ctypes.data + int(i) * PAGE for i in sorted(order)]
        return here, [there + int(i) * PAGE for i in order], [PAGE] * count

    def write(
        self, peer: str, there: int, span: bool = False, first: int = 0, count: int = PAGES, name: str = "main"
    ) -> Call:
        start, cpu = time.monotonic(), time.thread_time()
        engine, at = self.engines[name], first * PAGE
        if span:
            rc = engine.transfer_sync_write(peer, self.source.ctypes.data + at, there + at, count * PAGE)
        else:
            rc = engine.batch_transfer_sync_write(peer, *self.lists(there, first, count))
        return rc, start, time.monotonic(), time.thread_time() - cpu

    def submit(self, peer: str, there: int, span: bool = False) -> int:
        engine = self.engines["main"]
        if span:
            return int(engine.transfer_submit_write(peer, self.source.ctypes.data, there, SPAN))
        return int(engine.batch_transfer_async_write(peer, *self.lists(there, 0, PAGES)))

    def polled(self, peer: str, there: int) -> tuple[float, float, dict[int, int]]:
        """Submit each page by itself, then poll each once a millisecond, which never blocks: s, s of CPU, the codes."""
        engine, start, cpu = self.engines["main"], time.monotonic(), time.thread_time()
        waiting = [engine.transfer_submit_write(peer, *page) for page in zip(*self.lists(there, 0, PAGES), strict=True)]
        codes = Counter[int]()
        while waiting and time.monotonic() < start + 60:
            time.sleep(0.001)
            polls = [(batch, engine.transfer_check_status(batch)) for batch in waiting]
            waiting = [batch for batch, code in polls if code == 0]
            codes.update(code for _, code in polls if code != 0)
        return time.monotonic() - start, time.thread_time() - cpu, dict(codes)


def shorten_accept(port: int, milliseconds: int = 20) -> None:
    """Shorten the time-out of accept(), after which the engine's listener checks whether it has to end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # else the copy would leak
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family == socket.AF_INET and sock.getsockname()[1] == port:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, milliseconds * 1000))


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Measure the longest gap (ms) between two steps of a thread that wants to run each millisecond: it
    shows the GIL.
    """
    gap, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            last, before = time.monotonic(), last
            gap[0] = max(gap[0], (last - before) * 1e3)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    yield gap
    time.sleep(0.003)
    stop.set()
    thread.join(1)


def serve(conn: Any, pool_name: str, env: dict[str, str], side: type[Side]) -> None:
    os.environ.update({**ENV, **env})
    me = side(SharedMemory(pool_name))
    try:
        while True:
            verb, args, kwargs = conn.recv()
            conn.send(getattr(me, verb)(*args, **kwargs))
    except EOFError:
        me.engines.clear()


class Actor:
    """A spawned process with a Side that answers to verbs, one after the other, and can be killed or frozen."""

    def __init__(self, pool: SharedMemory, env: dict[str, str] | None = None, side: type[Side] = Side) -> None:
        context = mp.get_context("spawn")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, pool.name, env or {}, side), daemon=True)
        self.process.start()
        theirs.close()

    def post(self, verb: str, *args: Any, **kwargs: Any) -> None:
        self.conn.send((verb, args, kwargs))

    def reply(self, limit: float = 90) -> Any:
        if self.conn.poll(limit):
            return self.conn.recv()
        raise TimeoutError(f"no answer within {limit} s")

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        self.post(verb, *args, **kwargs)
        return self.reply()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def kill(self) -> tuple[float, float]:
        """SIGKILL: when it was sent, and when waitpid had told of the death."""
        sent = time.monotonic()
        self.process.kill()
        self.process.join(10)
        return sent, time.monotonic()


class Pool:
    """The shared pool as this process sees it."""

    def __init__(self) -> None:
        self.memory = SharedMemory(create=True, size=SPAN)
        self.bytes = np.ndarray(SPAN, np.uint8, buffer=self.memory.buf)
        self.sample = self.bytes[4095::4096]

    def part(self, stamp: int) -> float:
        return float((self.sample == stamp).mean())

    def wait(self, stamp: int, part: float, limit: float = 10) -> None:
        end = time.monotonic() + limit
        while self.part(stamp) < part:
            if time.monotonic() > end:
                raise TimeoutError("the write never came")
            time.sleep(0.0003)

    def last_change(self, seconds: float, part: Any = None, before: Any = None) -> float:
        """Watch (part of) the pool for some time. Returns when it was last seen to change (monotonic; 0.0 if never)."""
        part = self.sample if part is None else part
        end, last, before = time.monotonic() + seconds, 0.0, part.copy() if before is None else before
        while time.monotonic() < end:
            time.sleep(0.001)
            if not np.array_equal(now := part.copy(), before):
                last, before = time.monotonic(), now
        return last

    def free(self) -> None:
        del self.bytes, self.sample
        gc.collect()
        self.memory.close()
        self.memory.unlink()


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the listeners of a process: the kind of address, and the port."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                name = "any address" if set(address) == {"0"} else address
                found.append((f"{table} {name}", int(port, 16)))
    return found
