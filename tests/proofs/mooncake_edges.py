"""How one writer is shut out, which peers Mooncake's TransferEngine admits, what it listens on, and how fast it is.

python tests/proofs/mooncake_edges.py [item ...]      items 4, 8, 9; all of them without an argument
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from mooncake_actors import ENV, PAGES, SPAN, Actor, Call, Pool, Side, listening, row, run, spread

HALF = PAGES // 2


class EdgeSide(Side):
    def stream(self, peer: str, there: int, first: int, span: bool, seconds: float) -> list[Call]:
        """Write one half of the pool again and again, each time with another stamp, until a call fails."""
        calls: list[Call] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and (not calls or calls[-1][0] == 0):
            self.fill(len(calls) % 250 + 1)
            calls.append(self.write(peer, there, span, first, HALF))
        return calls

    def hole(self) -> int:
        """Register memory and unmap it, and return its address."""
        area = mmap.mmap(-1, 1 << 20)
        array = np.frombuffer(area, np.uint8)
        address = array.ctypes.data
        self.engines["main"].register_memory(address, 1 << 20)
        del array
        area.close()
        return address

    def stranger(self, peer: str, there: int) -> dict[str, int]:
        """Return what an engine can do that knows a peer's name and has no introduction."""
        engine, here = self.engines["main"], self.source.ctypes.data
        self.fill(77)
        return {
            "write registered memory": engine.transfer_sync_write(peer, here, there, 4096),
            "read registered memory": engine.transfer_sync_read(peer, here, there, 4096),
            "write past its end": engine.transfer_sync_write(peer, here, there + SPAN - 4096, 8192),
            "write elsewhere (a wild address)": engine.transfer_sync_write(peer, here, 0xDEAD0000, 4096),
        }

    def speed(self, peer: str, there: int, span: bool, threads: int, rounds: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            times = []
            for _ in range(rounds + 1):
                start, share = time.monotonic(), PAGES // threads
                calls = [pool.submit(self.write, peer, there, span, i * share, share) for i in range(threads)]
                if any(call.result()[0] for call in calls):
                    return 0.0
                times.append(time.monotonic() - start)
        return SPAN / median(times[1:]) / 1e9

    def engine_costs(self, count: int) -> tuple[list[float], list[int], list[float]]:
        def used() -> np.ndarray:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
            return np.array([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident])

        self.open("warm")
        before, times = used(), []
        for i in range(count):
            start = time.monotonic()
            self.open(f"e{i}")
            times.append((time.monotonic() - start) * 1e3)
        grown, cpu = used() - before, time.process_time()
        time.sleep(2)
        return times, grown.tolist(), [(time.process_time() - cpu) * 1e3]


def raw(port: int, opcode: int, address: int, size: int, payload: bytes = b"") -> bytes:
    """Speak Mooncake's own data protocol from a plain socket: nothing in it identifies the sender."""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.settimeout(5)
        sock.sendall(struct.pack("<QQB7x", size, address, opcode | 0x80) + payload)
        answer = b""
        with suppress(ConnectionError):
            while len(answer) < 8 + (size if opcode == 0 else 0) and (more := sock.recv(65536)):
                answer += more
    return answer


def revoke(trials: int = 5) -> None:
    pool = Pool()
    receiver, one, two = (Actor(pool.memory, side=EdgeSide) for _ in range(3))
    for writer in (one, two):
        writer.call("open")
    two_target = receiver.call("open", "two")
    sample = pool.sample[: HALF * 16]
    for verb in ("unregister", "close", "close hurried"):
        for span in (False, True):
            took, late, over, gaps, others, ends, codes = [], [], 0, [], [], [], Counter[int]()
            for _ in range(trials):
                target = receiver.call("open", "one", hurry="hurried" in verb)
                one.post("stream", *target, 0, span, 20.0)
                two.post("stream", *two_target, HALF, False, 2.5)
                time.sleep(0.3)
                receiver.post(verb.split()[0], "one")
                last = pool.last_change(2, sample)
                start, end, gap = receiver.reply()
                took.append((end - start) * 1e3)
                late.append(max(0.0, (last - start) * 1e3))
                over += last > end
                gaps.append(gap)
                failed = one.reply()[-1]
                codes[failed[0]] += 1
                ends.append((failed[2] - start) * 1e3)
                others += two.reply()
                if verb == "unregister":
                    receiver.call("close", "one")
            name = f"{verb}, peer sends {'32 MiB spans' if span else '64 KiB pages'}"
            row("4", f"{name}: the call took", f"{spread(took)}; GIL gap {spread(gaps)}")
            row("4", f"{name}: last byte after it BEGAN", f"{spread(late)}; in {over} after it RETURNED")
            row("4", f"{name}: the writer's call returns", f"{dict(codes)} after {spread(ends)}")
            bad, slowest = sum(c[0] != 0 for c in others), max((c[2] - c[1]) * 1e3 for c in others)
            row("4", f"{name}: the other peer's writes", f"{bad} of {len(others)} failed; slowest {slowest:.0f} ms")
    parts, took = [], []
    for _ in range(trials):
        target = receiver.call("open", "one", hurry=True)
        pool.bytes[:] = 0
        one.post("stream", *target, 0, True, 20.0)
        pool.wait(1, 0.1)
        one.signal(signal.SIGSTOP)
        start, end, _ = receiver.call("close", "one")
        took.append((end - start) * 1e3)
        before = sample.copy()
        one.signal(signal.SIGCONT)
        parts.append(pool.last_change(0.5, sample, before) == 0)
        one.reply()
    row("4", "a FROZEN writer's engine closed, then the writer goes on", f"nothing landed in {sum(parts)} of {trials}")
    row("4", "... the close took", spread(took))
    for actor in (receiver, one, two):
        actor.kill()
    pool.free()


def doors() -> None:
    pool = Pool()
    for env in ({}, {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}, {"MC_MIN_RPC_PORT": "16980", "MC_MAX_RPC_PORT": "16985"}):
        actor = Actor(pool.memory, env, EdgeSide)
        name, _ = actor.call("open")
        row("8", f"listens on, {env or 'by default'}", f"{name}: {listening(actor.process.pid or 0)}")
        actor.kill()
    receiver, stranger = Actor(pool.memory, side=EdgeSide), Actor(pool.memory, side=EdgeSide)
    peer, address = receiver.call("open")
    ports = [port for _, port in listening(receiver.process.pid or 0)]
    data = next(port for port in ports if str(port) != peer.split(":")[1])
    stranger.call("open")
    for what, rc in stranger.call("stranger", peer, address).items():
        row("8", f"a stranger's engine: {what}", f"returns {rc}")
    pool.bytes[:8] = 66
    seen, put = raw(data, 0, address, 8)[8:], raw(data, 1, address, 8, b"intruder")
    row(
        "8", "plain socket, 24-byte header: read, write", f"{seen!r}; status {put[:4].hex()}, {bytes(pool.bytes[:8])!r}"
    )
    answer = raw(data, 1, receiver.call("hole"), 4096, b"x" * 4096)
    row("8", "write to registered memory that was unmapped", f"answer {answer!r}; alive {receiver.process.is_alive()}")
    rng = np.random.default_rng(3)
    for port in ports:
        for _ in range(1000):
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.sendall(rng.bytes(int(rng.integers(1, 200))))
        what = "data port" if port == data else "rpc port"
        row("8", f"1,000 random strings to the {what}", f"alive {receiver.process.is_alive()}")
    time.sleep(1)
    row("8", "a write after that", f"returns {stranger.call('write', peer, address)[0]}")
    silent = [socket.create_connection(("127.0.0.1", int(peer.split(":")[1])), 5) for _ in range(2)]
    newcomer = Actor(pool.memory)
    newcomer.call("open")
    rc, start, end, _ = newcomer.call("write", peer, address)
    row("8", "2 silent connections to the rpc port: a newcomer's first write", f"{rc} after {end - start:.1f} s")
    silent += [socket.create_connection(("127.0.0.1", int(peer.split(":")[1])), 5)]
    time.sleep(0.1)
    start, end, gap = receiver.call("close")
    row("8", "1 silent connection: destroying the engine", f"{end - start:.1f} s, GIL held {gap / 1e3:.1f} s of it")
    for actor in (receiver, stranger, newcomer):
        actor.kill()
    pool.free()


def speed() -> None:
    pool = Pool()
    receiver = Actor(pool.memory)
    target = receiver.call("open")
    for pooled, rounds in (("1", 10), ("0", 3)):
        writer = Actor(pool.memory, {"MC_TCP_ENABLE_CONNECTION_POOL": pooled}, EdgeSide)
        writer.call("open")
        for span in (False, True):
            rates = [f"{writer.call('speed', *target, span, t, rounds):.2f}" for t in (1, 2)]
            shape = "one span" if span else "1,024 pages"
            row("9", f"64 MiB, {shape}, pool {pooled}, 1 / 2 threads", f"{' / '.join(rates)} GB/s (median of {rounds})")
        if pooled == "1":
            took, cpu, _ = map(list, zip(*(writer.call("polled", *target) for _ in range(10)), strict=True))
            rate, load = SPAN / median(took) / 1e9, median(cpu) / median(took)
            row("9", "64 MiB, a submit and polls for each page", f"{rate:.2f} GB/s, {load:.0%} of a core in Python")
        writer.kill()
    many = Actor(pool.memory, side=EdgeSide)
    times, grown, cpu = many.call("engine_costs", 16)
    row("9", "16 engines in one process, over the same memory", f"all work; each {spread(times)} to initialise")
    row(
        "9",
        "... they add",
        f"{grown[0]} threads, {grown[1]} fds, {grown[2]} KiB; idle CPU of all in 2 s: {cpu[0]:.1f} ms",
    )
    code = (
        "import re; t = lambda: re.search(r'SigCgt:\\s+(\\w+)', open('/proc/self/status').read()).group(1); a = t(); "
    )
    code += "import mooncake.engine as m; print(a, '->', t(), end='')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, env=os.environ
    )
    row("9", "signals caught before and after the import", f"{done.stdout}; stderr {len(done.stderr)} bytes")
    code = "import mooncake.engine as m; e = m.TransferEngine(); e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '')"
    plain = {k: v for k, v in os.environ.items() if k not in ENV}
    quiet = {"MC_LOG_LEVEL": "ERROR"}
    with TemporaryDirectory() as logs:
        for extra in ({}, {"GLOG_minloglevel": "2"}, quiet, {**quiet, "MC_LOG_DIR": logs}):
            env = {**plain, "MC_FORCE_TCP": "1", **extra}
            done = subprocess.run(
                [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, env=env
            )
            found = f"{len(done.stderr.splitlines())} lines on stderr, exit {done.returncode}"
            row("9", f"import and one engine with {', '.join(extra) or 'no log settings'}", found)
    for actor in (receiver, many):
        actor.kill()
    pool.free()


if __name__ == "__main__":
    run({"4": revoke, "8": doors, "9": speed})
