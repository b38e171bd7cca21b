"""Revoking a peer's writes at a NIXL receiver, what a notification promises, which peers an agent admits, and costs.

Run it as `python tests/proofs/nixl_edges.py [TRIALS]`: it prints one markdown table. It needs `nixl_cu12`, numpy, `ss`
and some 500 MiB of shared memory, and takes about 6 minutes for 10 trials.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from statistics import median

import numpy as np
from nixl_rig import MIB, TRANSPORTS, Child, counted, row, spread
from nixl_side import EVEN, Env

ODD = EVEN + 1
# Where the writer copies by itself (cma, sysv, posix), the receiver has no part in a write that it could stop.
REVOKED: dict[str, tuple[Env, dict[str, str], bool]] = {
    "default": ({}, {}, True),
    "tcp": ({"UCX_TLS": "tcp"}, {}, True),
    "tcp, no threads": ({"UCX_TLS": "tcp"}, {}, False),
    "^cma": ({"UCX_TLS": "^cma"}, {}, True),
    "errors none": ({}, {"ucx_error_handling_mode": "none"}, True),
}


def revoked(name: str, env: Env, params: dict[str, str], thread: bool, trials: int) -> None:
    """Item 4: end one of the receiver's two agents while both peers write, with the ended one's peer frozen or not."""
    for how, freeze in (("deregister", False), ("drop", False), ("drop", True)):
        a, b, receiver = Child("a", env, thread, params), Child("b", env, thread, params), Child("", env)
        receiver.do("make", "rb", thread, params)
        b.connect(receiver, "b", "rb")
        saw: Counter[str] = Counter()
        other: Counter[str] = Counter()
        late: list[float] = []
        took: list[float] = []
        gaps: list[float] = []
        again: Counter[str] = Counter()
        for value in range(1, trials + 1):
            mine = f"ra{value}"
            receiver.do("make", mine, thread, params)
            a.connect(receiver, "a", mine)
            a.do("fill", value)
            b.do("fill", value, True)
            a.send("write", "a", mine, EVEN, 5)
            if thread:
                receiver.until(value, 0.1, 2)
            else:
                receiver.do("notified", mine, 0.02)
            if freeze:
                a.signal(signal.SIGSTOP)
            b.send("write", "b", "rb", ODD, 10, b"done")
            ended = receiver.ask(how, mine)
            if freeze:
                # The thawed writer may be quick: what it does must not be in the first sample.
                before = receiver.landed(value)
                a.signal(signal.SIGCONT)
                time.sleep(0.3)
                late.append((receiver.landed(value) - before) * MIB)
            else:
                late.append(receiver.settle(value, ended.ended, 0.3)[0])
            receiver.do("notified", "rb", 10)
            took.append(ended.ms)
            gaps.append(ended.gap * 1e3)
            saw[a.get().value.state] += 1
            other[f"{b.get().value.state}, {'whole' if (receiver.words[ODD] == value).all() else 'torn'}"] += 1
            if how == "deregister":
                a.do("fill", value + 1000)
                a.send("write", "a", mine, EVEN[:32], 5, b"done")
                receiver.do("notified", mine, 10)
                state = a.get().value.state
                again[f"{state}, {'landed' if (receiver.words[EVEN[:32]] == value + 1000).all() else 'kept out'}"] += 1
        call = {"deregister": "deregister_memory", "drop": "agent of one peer destroyed"}[how]
        found = f"call {spread(took)}, GIL held {max(gaps):.0f} ms; landed after it in "
        found += f"{sum(mib > 0 for mib in late)}, at most "
        found += f"{max(late):.1f} MiB; writer saw {counted(saw)}; the other peer: {counted(other)}"
        found += f"; written anew with the old lists: {counted(again)}" if again else ""
        row(name, f"4 {call}{' while its writer was frozen' if freeze else ''}", trials, found)
        for child in (a, b, receiver):
            child.close()


def agents_cost(name: str, env: Env) -> None:
    """Item 4: make sixteen agents over one pool in one process, and measure what each costs, also when idle (9)."""
    for thread in (True, False):
        child = Child("", env)
        before = child.do("costs")
        made = [child.ask("make", f"agent{number}", thread) for number in range(16)]
        after = child.do("costs")
        time.sleep(2)
        idle = child.do("costs")[3] - after[3]
        threads, files, kib = ((after[i] - before[i]) / 16 for i in range(3))
        gone = [child.ask("drop", f"agent{number}") for number in range(16)]
        left = child.do("costs")
        found = f"made in {spread([reply.ms for reply in made[1:]])} (first {made[0].ms:.0f}), GIL held "
        found += f"{max(reply.gap for reply in made) * 1e3:.0f} ms; each {threads:.1f} threads, {files:.1f} fds, "
        found += f"{kib / 1024:.1f} MiB RSS; 16 idle for 2 s burn {idle * 1e3:.0f} ms of CPU; gone in "
        found += f"{spread([reply.ms for reply in gone])}; left behind: {left[0] - before[0]} threads, "
        found += f"{left[1] - before[1]} fds, {(left[2] - before[2]) / 1024:.0f} MiB"
        row(name, f"4 and 9 agents, progress thread {'on' if thread else 'off'}", 16, found)
        child.close()


def listening(child: Child) -> list[tuple[str, int]]:
    """Return the addresses that a process listens on, from `ss`."""
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    ours = [line.split()[3] for line in lines if f"pid={child.process.pid}," in line]
    return sorted((address.rpartition(":")[0], int(address.rpartition(":")[2])) for address in ours)


def ports(name: str, env: Env) -> None:
    """Item 8: find what an agent listens on, by default and limited to one device in each of two ways."""
    for how, more, params in (
        ("as it is", {}, {}),
        ("UCX_NET_DEVICES=lo", {"UCX_NET_DEVICES": "lo"}, {}),
        ("ucx_devices=lo", {}, {"ucx_devices": "lo"}),
    ):
        child, writer = Child("r", {**env, **more}, True, params), Child("w", {**env, **more}, True, params)
        writer.connect(child)
        state = writer.do("write", "w", "r", EVEN[:4], 5).state
        hosts = ["127.0.0.1" if host == "127.0.0.1" else "the interface's address" for host, _ in listening(child)]
        row(name, f"8 ports, {how}", 1, f"{len(hosts)} listening: {', '.join(hosts)}; a write: {state}")
        child.close()
        writer.close()


def strangers(name: str, env: Env) -> None:
    """Item 8: try a stranger with copied metadata, one that edits the address in it, and one that sends
    random bytes.
    """
    writer, receiver, thief = Child("w", env), Child("r", env), Child("thief", env)
    writer.connect(receiver)
    metadata, base = receiver.do("hello", "r")
    thief.do("fill", 7)
    thief.do("connect", "thief", metadata, base)
    state = thief.do("write", "thief", "r", EVEN[:4], 5).state
    landed = bool((receiver.words[EVEN[:4]] == 7).all())
    row(name, "8 copied metadata", 1, f"a third process writes: {state}, landed: {landed}")
    other = receiver.do("other_base")
    forged = metadata.replace(base.to_bytes(8, "little"), other.to_bytes(8, "little"))
    thief.do("ask", "thief", "remove_remote_agent", "r")
    reply = thief.ask("connect", "thief", forged, other)
    state = reply.raised or thief.do("write", "thief", "r", EVEN[:4], 5).state
    reached = receiver.do("other_landed", 7)
    found = f"address edited to memory that was never registered: {state}, {reached} bytes landed there"
    row(name, "8 forged metadata", 1, f"{found}; receiver alive: {receiver.alive()}")
    places, magic = listening(receiver), (0xCAFEBABE12345678).to_bytes(8, "little")
    for what, first in (("random bytes", b""), ("UCX's magic, then random bytes", magic)):
        rng, refused, sent = random.Random(3), 0, 0
        for number in range(1000):
            try:
                with socket.create_connection(places[number % len(places)], 2) as stream:
                    stream.sendall(first + rng.randbytes(rng.randrange(1, 4096)))
                    sent += 1
            except OSError:
                refused += 1
        time.sleep(0.5)
        works = writer.ask("write", "w", "r", EVEN[:32], 5).value.state if receiver.alive() else "-"
        found = f"{sent} sent, {refused} refused; agent's process alive: {receiver.alive()}"
        row(name, f"8 {what}", 1000, f"{found}; the peer's next write: {works}")
    for child in (writer, receiver, thief):
        child.close()


def notifications(name: str, env: Env, trials: int) -> None:
    """Item 7: test whether all is there when the notification is read, which side must poll, and how large
    it may be.
    """
    writer, receiver = Child("w", env), Child("r", env)
    writer.connect(receiver)
    pages = EVEN[:256]
    came = whole = 0
    for value in range(1, trials + 1):
        writer.do("fill", value)
        receiver.send("whole_when_notified", "r", value, pages, 5)
        writer.send("write", "w", "r", pages, 5, b"done")
        got, complete = receiver.get().value
        came, whole = came + got, whole + complete
        writer.get()
    row(name, "7 notification", trials, f"{came} came, {whole} with every byte of 16 MiB in place")
    state = writer.do("start", "w", "r", EVEN, b"unpolled")
    early = bool(receiver.do("notified", "r", 1))
    later = writer.do("state", "w", "r")
    late = bool(receiver.do("notified", "r", 1))
    found = f"transfer() {state}, not checked: came within 1 s: {early}; after one check ({later}): {late}"
    row(name, "7 who sends it", 1, found)
    sizes = []
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26):
        reply = writer.ask("ask", "w", "send_notif", "r", b"x" * size)
        got = receiver.do("notified", "r", 2).get("w", [b""])[0]
        sizes.append(f"{size >> 10} KiB: {reply.raised or ('whole' if len(got) == size else f'{len(got)} bytes')}")
    row(name, "7 size", 1, "; ".join(sizes))
    writer.close()
    receiver.close()


def speed(name: str, env: Env) -> None:
    """Item 9: measure GB/s of scattered and of adjacent pages in both error modes, and the cost of a request.

    It also shows which side must poll.
    """
    for mode in ("peer", "none"):
        params = {"ucx_error_handling_mode": mode}
        writer, receiver = Child("w", env, True, params), Child("r", env, True, params)
        writer.connect(receiver)
        rates: dict[str, float] = {}
        for what, pages in (("scattered", EVEN), ("adjacent", np.arange(len(EVEN), dtype=np.int32))):
            taken = []
            for _ in range(13):
                out = writer.do("write", "w", "r", pages, 10)
                taken.append(out.ended - out.began)
                writer.do("release", "w", "r")
            rates[what] = (MIB << 20) / median(taken[3:]) / 1e9
        found = ", ".join(f"{what} {rate:.2f} GB/s" for what, rate in rates.items())
        prepared, initialized = writer.do("request_costs", "w", "r", EVEN[:32])
        found += (
            f"; 32 pages: make_prepped_xfer {prepared:.0f} µs, get_xfer_descs and initialize_xfer {initialized:.0f} µs"
        )
        row(name, f"9 speed, errors {mode}", 10, found)
        writer.close()
        receiver.close()
    writer, receiver = Child("w", env), Child("r", env, False)
    writer.connect(receiver)
    writer.do("fill", 1)
    out = writer.do("write", "w", "r", EVEN, 2)
    idle = receiver.landed(1)
    reply = receiver.ask("notified", "r", 1)
    found = (
        f"nobody polls there: {out.state} after {out.ended - out.began:.1f} s, {idle:.0%} landed; with get_new_notifs "
    )
    found += f"for 1 s: {receiver.landed(1):.0%}, GIL held {reply.gap * 1e3:.0f} ms at most"
    row(name, "9 no progress thread on the receiver", 1, found)
    writer.close()
    receiver.close()


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"| transport | case ({MIB} MiB writes) | trials | found |\n|---|---|---|---|")
    for name, env in TRANSPORTS.items():
        notifications(name, env, 20 * trials)
        speed(name, env)
        agents_cost(name, env)
        ports(name, env)
        strangers(name, env)
    for name, (env, params, thread) in REVOKED.items():
        revoked(name, env, params, thread, trials)


if __name__ == "__main__":
    main()
