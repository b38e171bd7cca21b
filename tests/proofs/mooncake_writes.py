"""What Mooncake's TransferEngine really does when a KV write is cut short, measured over TCP on loopback.

A backend may release pages only when it knows that no peer writes to them (or reads from them) any more. These proofs
ask the engine itself: receivers and writers are killed, or told to give up, in the middle of 64 MiB writes (1,024
scattered pages of 64 KiB, or one span). Every figure in the markdown table that is printed was measured by this run.

    python tests/proofs/mooncake_writes.py [item ...]     items 1, 2, 3, 7: deaths, giving up, what success means
    python tests/proofs/mooncake_peers.py [item ...]      items 5, 6: frozen and restarted peers
    python tests/proofs/mooncake_edges.py [item ...]      items 4, 8, 9: shutting one writer out, strangers, speed
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
from mooncake_actors import PAGE, SPAN, Actor, Call, Pool, Side, row, run, spread


class WriterSide(Side):
    def overfull(self, peer: str, there: int) -> int:
        """Write a batch of 4,096 pages of 16 KiB: more than the queue of the connection pool takes by default."""
        here, step = self.source.ctypes.data, SPAN // 4096
        offsets = [i * step for i in range(4096)]
        sources, targets = [here + o for o in offsets], [there + o for o in offsets]
        return int(self.engines["main"].batch_transfer_sync_write(peer, sources, targets, [step] * 4096))


def receivers_die(trials: int = 100) -> None:
    pool, spare = Pool(), Pool()
    me = Side(spare.memory)
    me.open()
    me.fill(1)
    healthy_actor = Actor(spare.memory)
    healthy, stop = healthy_actor.call("open"), threading.Event()
    beats: list[Call] = []

    def beat() -> None:
        while not stop.wait(0.005):
            beats.append(me.write(healthy[0], healthy[1], count=16))

    heart = threading.Thread(target=beat)
    heart.start()
    codes, again = Counter[int](), Counter[int]()
    waits, tries, parts, rng = [], [], [], np.random.default_rng(1)
    with ThreadPoolExecutor(1) as worker:
        for _ in range(trials // 10):
            receivers = [Actor(pool.memory) for _ in range(10)]
            for receiver in receivers:
                peer = receiver.call("open")
                pool.bytes[:] = 0
                future = worker.submit(me.write, *peer)
                pool.wait(1, rng.uniform(0.01, 0.6))
                sent, _ = receiver.kill()
                rc, _, end, _ = future.result(90)
                codes[rc] += 1
                waits.append((end - sent) * 1e3)
                parts.append(pool.part(1))
            rc, start, end, _ = me.write(*peer)
            again[rc] += 1
            tries.append((end - start) * 1e3)
    stop.set()
    heart.join(10)
    cut = sum(part < 1 for part in parts)
    row(
        "1",
        "receiver SIGKILLed in a write: the sync call returns",
        f"{dict(codes)}; {cut} of {trials} cut short",
    )
    row("1", "from the SIGKILL to the return of the call", spread(waits))
    bad, times = sum(b[0] != 0 for b in beats), [(b[2] - b[1]) * 1e3 for b in beats]
    row(
        "1",
        "1 MiB writes to a healthy peer, same engine, meanwhile",
        f"{len(beats)} calls, {bad} failed; {spread(times)}",
    )
    row("1", "a further write to a peer known to be dead", f"{dict(again)} after {spread(tries)}")
    row("1", "writer afterwards", f"alive; a full write to the healthy peer returns {me.write(*healthy)[0]}")
    polls, times = Counter[int](), []
    writer = Actor(pool.memory)
    writer.call("open")
    writer.call("fill", 1)
    for _ in range(10):
        receiver = Actor(pool.memory)
        peer = receiver.call("open")
        pool.bytes[:] = 0
        writer.post("polled", *peer)
        pool.wait(1, 0.1)
        sent, _ = receiver.kill()
        _, _, found = writer.reply()
        times.append((time.monotonic() - sent) * 1e3)
        polls.update(found)
    row("1", "1,024 pages submitted one by one and polled", f"10 receivers killed: poll codes {dict(polls)}")
    row("1", "... until the last page has ended", spread(times))
    writer.kill()
    healthy_actor.kill()
    me.engines.clear()
    me.pool = me.source
    for area in (pool, spare):
        area.free()


def writers_die(trials: int = 20) -> None:
    pool = Pool()
    receiver = Actor(pool.memory)
    target, rng = receiver.call("open"), np.random.default_rng(2)
    for label, span, frozen in (("scattered", False, 0.0), ("one span", True, 0.0), ("frozen 1 s", True, 1.0)):
        late, more, cut = [], [], 0
        for _ in range(trials // 10):
            writers = [Actor(pool.memory) for _ in range(10)]
            for writer in writers:
                writer.call("open")
                writer.call("fill", 1)
                pool.bytes[:] = 0
                writer.post("write", *target, span=span)
                pool.wait(1, rng.uniform(0.01, 0.6))
                if frozen:
                    receiver.signal(signal.SIGSTOP)
                    time.sleep(0.05)
                _, dead = writer.kill()
                then, before = pool.part(1), pool.sample.copy()
                if frozen:
                    time.sleep(frozen)
                    receiver.signal(signal.SIGCONT)
                late.append(max(0.0, (pool.last_change(0.4, before=before) - dead) * 1e3))
                more.append((pool.part(1) - then) * SPAN / 2**20)
                cut += pool.part(1) < 1
        row(
            "2", f"writer SIGKILLed, {label}: last change in the pool after waitpid", f"{spread(late)}; {cut} cut short"
        )
        row("2", f"writer SIGKILLed, {label}: landed after waitpid", spread(more, "MiB"))
    writer = Actor(pool.memory)
    writer.call("open")
    row("2", "receiver afterwards", f"alive, a new writer's call returns {writer.call('write', *target)[0]}")
    for actor in (writer, receiver):
        actor.kill()
    pool.free()


def writers_give_up(trials: int = 10) -> None:
    pool = Pool()
    receiver, writer = Actor(pool.memory), Actor(pool.memory)
    target = receiver.call("open")
    names = dir(import_module("mooncake.engine").TransferEngine)
    row("3", "calls that cancel a write", str([n for n in names if "cancel" in n or "abort" in n or "close" in n]))
    writer.call("open")
    writer.call("fill", 1)
    took, late, parts, gaps = [], [], [], []
    for trial in range(2 * trials):
        pool.bytes[:] = 0
        writer.call("submit", *target, span=trial % 2 == 0)
        pool.wait(1, 0.01)
        writer.post("close")
        last = pool.last_change(2)
        start, end, gap = writer.reply()
        took.append((end - start) * 1e3)
        gaps.append(gap)
        late.append((last - start) * 1e3)
        parts.append(pool.part(1))
        writer.call("open")
    row("3", "engine destroyed with a write under way: del returns after", f"{spread(took)}; no crash")
    row("3", "... other Python threads stand still meanwhile", spread(gaps))
    row("3", "... last byte lands, after del was CALLED", f"{spread(late)}; {sum(p < 1 for p in parts)} cut short")
    parts.clear()
    for _ in range(trials):
        pool.bytes[:] = 0
        writer.call("submit", *target)
        time.sleep(0.5)
        parts.append(pool.part(1))
    row("3", "async write that nobody asks about again", f"landed whole in {sum(p == 1 for p in parts)} of {trials}")
    for env in ({}, {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}):
        late, parts, codes = [], [], Counter[int]()
        for _ in range(trials):
            one = Actor(pool.memory, env, WriterSide)
            one.call("open")
            one.call("fill", 1)
            one.call("write", *target, count=1)
            pool.bytes[:] = 0
            codes[one.call("overfull", *target)] += 1
            then, end = pool.part(1), time.monotonic()
            late.append(max(0.0, (pool.last_change(0.5) - end) * 1e3))
            parts.append((pool.part(1) - then) * SPAN / 2**20)
            one.kill()
        row("3", f"sync batch of 4,096 pages, {env or 'defaults'}", f"returns {dict(codes)}")
        row("3", "... lands AFTER that return", f"{spread(parts, 'MiB')}, for {spread(late)}")
    for actor in (writer, receiver):
        actor.kill()
    pool.free()


def sync_means_landed(trials: int = 200) -> None:
    pool = Pool()
    receiver = Actor(pool.memory)
    target = receiver.call("open")
    for label, value in (("default, acknowledged", "2"), ("MC_TCP_PROTO=1, legacy", "1")):
        writer = Actor(pool.memory, {"MC_TCP_PROTO": value})
        writer.call("open")
        writer.call("write", *target, count=1)
        whole = 0
        for trial in range(trials):
            writer.call("fill", trial % 250 + 1)
            pool.bytes[: 64 * PAGE] = 0
            writer.post("write", *target, count=64, span=trial % 2 == 0)
            call = writer.reply()
            whole += call[0] == 0 and bool((pool.bytes[: 64 * PAGE] == trial % 250 + 1).all())
        row("7", f"4 MiB sync write returned 0 ({label})", f"every byte there at once: {whole} of {trials}")
        writer.kill()
    receiver.kill()
    pool.free()


if __name__ == "__main__":
    run({"1": receivers_die, "2": writers_die, "3": writers_give_up, "7": sync_means_landed})
