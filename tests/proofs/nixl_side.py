"""A side of the NIXL proofs: a child process that holds agents over one pool and answers one call at a time.

The pool is shared memory, so that the parent can see what lands in it whatever becomes of the child.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

PAGE = 64 * 1024
PAGES = 2048
# Every second page, in a random order: nothing for NIXL to merge.
EVEN = np.random.default_rng(1).permutation(PAGES // 2).astype(np.int32) * 2
Env = dict[str, str]
POLL = 0.0005


@dataclass
class Told:
    """What a call came to in the child: its result or the exception, how long it took, how long it held the GIL."""

    value: Any
    raised: str
    began: float
    ended: float
    gap: float

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1e3


@dataclass
class Wrote:
    """How a write ended for its writer, and how the writes to a healthy peer beside it fared."""

    state: str
    began: float
    ended: float
    posting: float
    longest_check: float
    beside: int = 0
    beside_failed: int = 0


class Side:
    """One child: its pool, its agents by name, and one write at a time from each agent to each peer."""

    def __init__(self, pool: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        logging.getLogger("nixl").setLevel(logging.ERROR)
        self.new = lambda name, thread: nixl_agent(name, nixl_agent_config(backends=[], enable_prog_thread=thread))
        self.memory = shared_memory.SharedMemory(pool)
        self.words = np.ndarray((PAGES, PAGE // 8), np.uint64, self.memory.buf)
        self.base = self.words.ctypes.data
        # Memory that no agent registers.
        self.other = np.zeros(PAGES * PAGE // 8, np.uint64)
        self.agents: dict[str, Any] = {}
        self.registered: dict[str, Any] = {}
        self.lists: dict[tuple[str, str], Any] = {}
        self.writes: dict[tuple[str, str], Any] = {}
        self.bases: dict[str, int] = {}

    def make(self, name: str, thread: bool = True, params: dict[str, str] | None = None) -> None:
        agent = self.new(name, thread)
        agent.create_backend("UCX", params or {})
        self.registered[name] = agent.register_memory([(self.base, PAGES * PAGE, 0, "kv")], "DRAM")
        self.agents[name] = agent

    def hello(self, name: str) -> tuple[bytes, int]:
        return self.agents[name].get_agent_metadata(), self.base

    def pages(self, base: int) -> np.ndarray:
        rows = np.zeros((PAGES, 3), np.uint64)
        rows[:, 0] = np.uint64(base) + np.arange(PAGES, dtype=np.uint64) * np.uint64(PAGE)
        rows[:, 1] = PAGE
        return rows

    def connect(self, me: str, metadata: bytes, base: int) -> str:
        agent = self.agents[me]
        peer = agent.add_remote_agent(metadata)
        peer = peer.decode() if isinstance(peer, bytes) else peer
        if (me, "") not in self.lists:
            self.lists[me, ""] = agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.pages(self.base), "DRAM")
        self.bases[peer] = base
        self.lists[me, peer] = agent.prep_xfer_dlist(peer, self.pages(base), "DRAM")
        return peer

    def fill(self, value: int, odd: bool = False) -> None:
        self.words[int(odd) :: 2] = value

    def start(self, me: str, peer: str, pages: np.ndarray, notif: bytes = b"") -> str:
        agent = self.agents[me]
        self.writes[me, peer] = agent.make_prepped_xfer(
            "WRITE", self.lists[me, ""], pages, self.lists[me, peer], pages, notif
        )
        state: str = agent.transfer(self.writes[me, peer])
        return state

    def state(self, me: str, peer: str) -> str:
        state: str = self.agents[me].check_xfer_state(self.writes[me, peer])
        return state

    def release(self, me: str, peer: str) -> None:
        self.writes.pop((me, peer)).release()

    def write(self, me: str, peer: str, pages: np.ndarray, limit: float, notif: bytes = b"", beside: str = "") -> Wrote:
        """Write and poll to the end; beside names a healthy peer that gets small writes all the while."""
        out = Wrote("", time.monotonic(), 0.0, 0.0, 0.0)
        try:
            out.state = self.start(me, peer, pages, notif)
            out.posting = time.monotonic() - out.began
            while out.state == "PROC" and time.monotonic() < out.began + limit:
                if beside:
                    self.small(out, me, beside)
                time.sleep(POLL)
                checked = time.monotonic()
                out.state = self.state(me, peer)
                out.longest_check = max(out.longest_check, time.monotonic() - checked)
        except Exception as error:  # noqa: BLE001  # Which exceptions there are is the question.
            out.state = f"{type(error).__name__} from {'check' if out.posting else 'transfer()'}"
            out.posting = out.posting or time.monotonic() - out.began
        out.ended = time.monotonic()
        return out

    def small(self, out: Wrote, me: str, peer: str) -> None:
        done = self.write(me, peer, EVEN[:8], 5)
        out.beside += done.state == "DONE"
        out.beside_failed += done.state != "DONE"
        self.release(me, peer)

    def drop(self, name: str) -> int:
        """Destroy an agent, as a program does it: every reference goes, the handles first."""
        for table in (self.writes, self.lists):
            for key in [key for key in table if key[0] == name]:
                table.pop(key)
        self.registered.pop(name)
        agent = self.agents.pop(name)
        held = sys.getrefcount(agent) - 2
        del agent
        gc.collect()
        return held

    def deregister(self, name: str) -> None:
        self.agents[name].deregister_memory(self.registered[name])

    def ask(self, name: str, method: str, *args: Any) -> Any:
        return getattr(self.agents[name], method)(*args)

    def notified(self, name: str, limit: float) -> dict[str, list[bytes]]:
        got: dict[str, list[bytes]]
        end = time.monotonic() + limit
        while not (got := self.agents[name].get_new_notifs()) and time.monotonic() < end:
            time.sleep(POLL)
        return got

    def whole_when_notified(self, name: str, value: int, pages: np.ndarray, limit: float) -> tuple[bool, bool]:
        """Return whether a notification came, and whether every byte was there at that moment."""
        got = self.notified(name, limit)
        return bool(got), bool((self.words[pages] == value).all())

    def request_costs(self, me: str, peer: str, pages: np.ndarray) -> tuple[float, float]:
        """Measure the microseconds to make a request from the lists prepared once, and from lists made for it."""
        agent, ours, prepared, initialized = self.agents[me], self.pages(self.base)[pages], [], []
        theirs = self.pages(self.bases[peer])[pages]
        for _ in range(200):
            began = time.perf_counter()
            handle = agent.make_prepped_xfer("WRITE", self.lists[me, ""], pages, self.lists[me, peer], pages, b"n")
            prepared.append(time.perf_counter() - began)
            handle.release()
            began = time.perf_counter()
            local, remote = agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
            handle = agent.initialize_xfer("WRITE", local, remote, peer, b"n")
            initialized.append(time.perf_counter() - began)
            handle.release()
        return median(prepared) * 1e6, median(initialized) * 1e6

    def costs(self) -> tuple[int, int, int, float]:
        """Return threads, file descriptors, resident KiB and CPU seconds of this process."""
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * 4
        times = os.times()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident, times.user + times.system

    def other_base(self) -> int:
        return self.other.ctypes.data

    def other_landed(self, value: int) -> int:
        return int((self.other == value).sum()) * 8


def serve(pipe: Connection, pool: str) -> None:
    side = Side(pool)
    beats = [0.0]

    def beat() -> None:
        """Note the longest time in which this thread could not run: a call that holds the GIL makes it long."""
        last = time.monotonic()
        while True:
            time.sleep(0.001)
            now = time.monotonic()
            beats[0] = max(beats[0], now - last)
            last = now

    threading.Thread(target=beat, daemon=True).start()
    pipe.send("up")
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        beats[0] = 0.0
        value, raised, began = None, "", time.monotonic()
        try:
            value = getattr(side, method)(*args)
        except Exception as error:  # noqa: BLE001  # As above.
            raised = f"{type(error).__name__}: {error}"
        pipe.send(Told(value, raised, began, time.monotonic(), beats[0]))
