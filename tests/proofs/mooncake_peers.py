"""How Mooncake's TransferEngine takes peers that stop answering, and peers that come back as another process.

python tests/proofs/mooncake_peers.py [item ...]      items 5 and 6; both without an argument
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mooncake_actors import Actor, Call, Pool, Side, Target, listening, row, run, spread, ticking


class PeerSide(Side):
    def ticked_write(self, peer: str, there: int) -> tuple[Call, float]:
        with ticking() as gap:
            call = self.write(peer, there)
        return call, gap[0]

    def first_contact(self, frozen: Target, healthy: Target, name: str) -> tuple[float, float]:
        """Greet a frozen peer in a thread.

        Returns the longest write to a healthy peer meanwhile, and the greeting's time.
        """
        longest, end = 0.0, time.monotonic() + 1.5
        with ThreadPoolExecutor(1) as pool:
            hello = pool.submit(self.write, *frozen, count=16, name=name)
            while time.monotonic() < end:
                time.sleep(0.1)
                call = self.write(*healthy, count=16)
                longest = max(longest, call[2] - call[1])
            _, start, end, _ = hello.result(90)
        return longest * 1e3, (end - start) * 1e3

    def leave(self, peer: str, there: int, hard: bool) -> None:
        """End this process while a thread of it is blocked in a write to a frozen peer."""
        threading.Thread(target=self.write, args=(peer, there), daemon=True).start()
        time.sleep(0.3)
        if hard:
            os._exit(0)
        raise EOFError


def freeze() -> None:
    pool, spare = Pool(), Pool()
    receiver, idle = Actor(pool.memory), Actor(spare.memory)
    target, healthy = receiver.call("open"), idle.call("open")
    for label, env, seconds in (
        ("thawed after 3 s", {}, 3.0),
        ("defaults", {}, 0.0),
        ("MC_TRANSFER_TIMEOUT=5", {"MC_TRANSFER_TIMEOUT": "5"}, 0.0),
        ("MC_SLICE_TIMEOUT=2", {"MC_SLICE_TIMEOUT": "2"}, 8.0),
        ("MC_TCP_STATUS_TIMEOUT_SEC=2", {"MC_TCP_STATUS_TIMEOUT_SEC": "2"}, 8.0),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC=2", {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2"}, 0.0),
    ):
        writer = Actor(pool.memory, env, PeerSide)
        writer.call("open")
        writer.call("fill", 1)
        writer.call("write", *healthy, count=1)
        pool.bytes[:] = 0
        writer.post("ticked_write", *target)
        pool.wait(1, 0.1)
        receiver.signal(signal.SIGSTOP)
        writer.conn.poll(seconds or 45)
        early, then = writer.conn.poll(0), pool.part(1)
        receiver.signal(signal.SIGCONT)
        pool.last_change(1)
        (rc, start, end, cpu), gap = writer.reply()
        when = "while frozen" if early else "only once thawed"
        row("5", f"receiver frozen, {label}", f"returned {rc} after {end - start:.1f} s ({when}), {cpu:.1f} s of CPU")
        row("5", "... landed when it was thawed / 1 s later", f"{then:.0%} / {pool.part(1):.0%}; GIL gap {gap:.0f} ms")
        writer.kill()
    for hard in (False, True):
        codes, times = Counter[Any](), []
        for _ in range(3):
            writer = Actor(pool.memory, side=PeerSide)
            writer.call("open")
            writer.call("write", *target, count=1)
            receiver.signal(signal.SIGSTOP)
            start = time.monotonic()
            writer.post("leave", *target, hard)
            writer.process.join(60)
            codes[writer.process.exitcode] += 1
            times.append((time.monotonic() - start) * 1e3)
            writer.kill()
            receiver.signal(signal.SIGCONT)
        how = "os._exit" if hard else "an ordinary exit"
        row("5", f"{how} with a thread in a write to a frozen peer", f"exit codes {dict(codes)} after {spread(times)}")
    writer = Actor(pool.memory, side=PeerSide)
    for name in ("main", "another"):
        writer.call("open", name)
        writer.call("write", *healthy, count=1)
        waits, hellos = [], []
        for _ in range(5):
            new = Actor(spare.memory)
            unknown = new.call("open")
            new.signal(signal.SIGSTOP)
            writer.post("first_contact", unknown, healthy, name)
            time.sleep(2)
            new.signal(signal.SIGCONT)
            wait, hello = writer.reply()
            waits.append(wait)
            hellos.append(hello)
            new.kill()
        which = "the same engine" if name == "main" else "an engine of its own"
        row("5", f"first write ever to a peer frozen for 2 s, {which}: it returns after", spread(hellos))
        row("5", f"... a write to a healthy peer meanwhile, {which}", spread(waits))
    for actor in (receiver, idle, writer):
        actor.kill()
    for area in (pool, spare):
        area.free()


def restart() -> None:
    pool = Pool()
    narrow = {"MC_MIN_RPC_PORT": "16990", "MC_MAX_RPC_PORT": "16992"}
    writer, old = Actor(pool.memory), Actor(pool.memory, narrow)
    writer.call("open")
    peer, address = old.call("open")
    data = next(port for _, port in listening(old.process.pid or 0) if str(port) != peer.split(":")[1])
    writer.call("write", peer, address)
    writer.post("write", peer, address)
    time.sleep(0.02)
    old.kill()
    row("6", "receiver killed; what the write in flight returned", str(writer.reply()[0]))
    new = Actor(pool.memory, narrow)
    for _ in range(30):
        try:
            name, place = new.call("open")
        except (EOFError, TimeoutError):
            row("6", "restart on three ports", "no free port: the old ones linger")
            return
        if (
            (here := listening(new.process.pid or 0))
            and any(p == data for _, p in here)
            and name != f"127.0.0.1:{data}"
        ):
            break
        new.call("close")
    row("6", "a NEW process listens on the old data port", f"names {peer} -> {name}, data {data}")
    for label, at in (("the new process's address", place), ("the dead process's address", address)):
        if label.startswith("the dead") and at == place:
            continue
        writer.call("fill", 9)
        pool.bytes[:] = 0
        rc = writer.call("write", peer, at)[0]
        row("6", f"same writer, write to the OLD name, {label}", f"returns {rc}, landed {pool.part(9):.0%}")
    writer.call("close")
    writer.call("open")
    row("6", "a fresh engine, write to the OLD name", f"returns {writer.call('write', peer, place)[0]}")
    row("6", "a fresh engine, write to the new name", f"returns {writer.call('write', name, place)[0]}")
    for actor in (writer, new):
        actor.kill()
    pool.free()


if __name__ == "__main__":
    run({"5": freeze, "6": restart})
