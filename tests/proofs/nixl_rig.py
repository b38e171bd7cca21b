"""The parent of the NIXL proofs: it starts the sides, signals them, and watches what lands in their pools."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from statistics import median
from typing import Any

import numpy as np
from nixl_side import EVEN, PAGE, PAGES, POLL, Env, Told, serve

MIB = len(EVEN) * PAGE >> 20
TRANSPORTS: dict[str, Env] = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}


class Child:
    """A child process with one agent of its own name, and the parent's view of its pool."""

    def __init__(
        self, name: str, env: dict[str, str], thread: bool = True, params: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.memory = shared_memory.SharedMemory(create=True, size=PAGES * PAGE)
        self.words = np.ndarray((PAGES, PAGE // 8), np.uint64, self.memory.buf)
        # One word of each 4 KiB of the even pages: a sample takes a fraction of a millisecond.
        self.sample = self.words[::2, ::512]
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.memory.name), daemon=True)
        with _environment({"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", **env}):
            self.process.start()
        theirs.close()
        assert self.get(60) == "up"
        if name:
            self.do("make", name, thread, params)

    def send(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def get(self, limit: float = 60) -> Any:
        if not self.pipe.poll(limit):
            raise TimeoutError(f"{self.name} did not answer in {limit} s")
        return self.pipe.recv()

    def ask(self, method: str, *args: Any, limit: float = 60) -> Told:
        self.send(method, *args)
        reply: Told = self.get(limit)
        return reply

    def do(self, method: str, *args: Any) -> Any:
        reply = self.ask(method, *args)
        if reply.raised:
            raise RuntimeError(f"{self.name}.{method}: {reply.raised}")
        return reply.value

    def connect(self, receiver: Child, me: str = "", peer: str = "") -> None:
        self.do("connect", me or self.name, *receiver.do("hello", peer or receiver.name))

    def alive(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: int) -> float:
        """Send a signal; after SIGKILL, wait until the process is surely gone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(10)
        return time.monotonic()

    def landed(self, value: int) -> float:
        return float((self.sample == value).mean())

    def until(self, value: int, part: float, limit: float = 5) -> bool:
        """Wait until that part of a write has landed; a whole one takes tens of milliseconds."""
        return wait(lambda: self.landed(value) >= part, limit, 0.0002)

    def settle(self, value: int, since: float, quiet: float = 0.3, limit: float = 5) -> tuple[float, float]:
        """Sample each millisecond until nothing has changed for a while: MiB that landed, ms of the last change."""
        first = before = self.landed(value)
        begin = last = time.monotonic()
        while time.monotonic() - last < quiet and time.monotonic() - begin < limit:
            time.sleep(0.001)
            if (now := self.landed(value)) != before:
                before, last = now, time.monotonic()
        return (before - first) * MIB, (last - since) * 1e3 if before != first else 0.0

    def close(self) -> None:
        if self.alive():
            self.signal(signal.SIGKILL)
        del self.words, self.sample
        self.memory.close()
        self.memory.unlink()


def wait(happened: Callable[[], bool], limit: float, step: float = POLL) -> bool:
    end = time.monotonic() + limit
    while not (yes := happened()) and time.monotonic() < end:
        time.sleep(step)
    return yes


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def row(transport: str, what: str, trials: int, found: str) -> None:
    print(f"| {transport} | {what} | {trials} | {found} |", flush=True)


def spread(milliseconds: list[float]) -> str:
    """Format median and worst. A call that ended before the moment from which it is timed counts as 0 ms."""
    at_most = [max(0.0, value) for value in milliseconds]
    return f"{median(at_most):.1f} (max {max(at_most):.1f}) ms" if at_most else "-"


def counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
