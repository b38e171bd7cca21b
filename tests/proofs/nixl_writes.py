"""What becomes of a NIXL write when a side dies, freezes, aborts or starts anew.

Run it as `python tests/proofs/nixl_writes.py [TRIALS]`: it prints one markdown table, for the transports that UCX takes
on one host by default and for TCP alone. Each trial writes 64 MiB as 1,024 scattered pages and acts at a random moment
in the middle. It needs `nixl_cu12` and numpy, some 300 MiB of shared memory, and about 10 minutes for 100 trials.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from nixl_rig import MIB, TRANSPORTS, Child, counted, row, spread
from nixl_side import EVEN, Env


def receiver_killed(name: str, env: Env, trials: int) -> None:
    """Item 1: kill the receiver by SIGKILL. Meanwhile and afterwards the same agent writes to a healthy one."""
    writer, healthy, rng = Child("w", env), Child("healthy", env), random.Random(1)
    writer.connect(healthy)
    saw: Counter[str] = Counter()
    closing: Counter[str] = Counter()
    after: list[float] = []
    posting: list[float] = []
    checking: list[float] = []
    beside = beside_failed = whole = 0
    for value in range(1, trials + 1):
        victim = Child(f"r{value}", env)
        writer.connect(victim)
        writer.do("fill", value)
        writer.send("write", "w", victim.name, EVEN, 10, b"", "healthy")
        victim.until(value, rng.uniform(0.02, 0.7))
        killed = victim.signal(signal.SIGKILL)
        out = writer.get().value
        saw[out.state] += 1
        if out.state != "DONE":
            after.append((out.ended - killed) * 1e3)
        posting.append(out.posting * 1e3)
        checking.append(out.longest_check * 1e3)
        beside, beside_failed = beside + out.beside, beside_failed + out.beside_failed
        whole += writer.do("write", "w", "healthy", EVEN[:32], 5).state == "DONE"
        whole -= not (healthy.words[EVEN[:32]] == value).all()
        closing[f"release {writer.ask('release', 'w', victim.name).raised or 'ok'}"] += 1
        removed = writer.ask("ask", "w", "remove_remote_agent", victim.name)
        closing[f"remove_remote_agent {removed.raised or 'ok'}"] += 1
        writer.do("release", "w", "healthy")
        victim.close()
    found = f"writer saw {counted(saw)}; {spread(after)} after the death was sure; transfer() took {spread(posting)}"
    row(name, "1 receiver killed", trials, f"{found}, check {spread(checking)}; writer alive: {writer.alive()}")
    row(name, "1 healthy peer", trials, f"during: {beside} done, {beside_failed} failed; after: {whole} whole")
    row(name, "1 closing up", trials, counted(closing))
    writer.close()
    healthy.close()


def writer_killed(name: str, env: Env, trials: int) -> None:
    """Item 2: kill the writer by SIGKILL, and see what the receiver learns, and what lands after the death
    is certain.
    """
    receiver, rng = Child("r", env), random.Random(2)
    last: list[float] = []
    late: list[float] = []
    notified = middle = 0
    for value in range(1, trials + 1):
        writer = Child(f"w{value}", env)
        writer.connect(receiver)
        writer.do("fill", value)
        writer.send("write", writer.name, "r", EVEN, 10, b"done")
        receiver.until(value, rng.uniform(0.02, 0.7))
        dead = writer.signal(signal.SIGKILL)
        middle += receiver.landed(value) < 1
        mib, ms = receiver.settle(value, dead)
        late.append(mib)
        last.append(ms)
        notified += bool(receiver.do("notified", "r", 0.02))
        writer.close()
    moved = sum(mib > 0 for mib in late)
    found = (
        f"{middle} cut in the middle; bytes came after the death in {moved}: last change at most {max(last):.1f} ms,"
    )
    row(name, "2 writer killed", trials, f"{found} at most {max(late):.2f} MiB; receiver alive: {receiver.alive()}")
    row(name, "2 receiver learns", trials, f"no call fails and nothing is told; notifications: {notified}")
    receiver.close()


def writer_killed_unread(name: str, env: Env, trials: int) -> None:
    """Item 2: kill the writer while the receiver is frozen, like one that is slow to poll."""
    receiver = Child("r", env)
    late: list[float] = []
    for value in range(1, trials + 1):
        writer = Child(f"w{value}", env)
        writer.connect(receiver)
        writer.do("fill", value)
        writer.send("write", writer.name, "r", EVEN, 10)
        receiver.until(value, 0.1)
        receiver.signal(signal.SIGSTOP)
        time.sleep(0.05)
        writer.signal(signal.SIGKILL)
        time.sleep(0.5)
        before = receiver.landed(value)
        receiver.signal(signal.SIGCONT)
        time.sleep(0.5)
        late.append((receiver.landed(value) - before) * MIB)
        writer.close()
    found = f"SIGCONT 0.5 s after the death: bytes landed in {sum(mib > 0 for mib in late)}, "
    found += f"at most {max(late):.1f} MiB"
    row(name, "2 writer killed, receiver frozen", trials, found)
    receiver.close()


def writer_aborts(name: str, env: Env, trials: int) -> None:
    """Item 3: abort in four ways, with and without a progress thread, and see what lands after the call returned."""
    called = {"drop": "agent destroyed"}
    for thread in (True, False):
        for how in ("release", "remove_remote_agent", "deregister", "drop"):
            # Deregistered memory cannot be registered again beneath the same lists.
            times = 1 if how == "deregister" else trials
            writer, receiver = Child("w", env, thread), Child("r", env)
            writer.connect(receiver)
            took: list[float] = []
            gap, last = 0.0, 0.0
            late: list[float] = []
            polled: list[float] = []
            outcome: Counter[str] = Counter()
            for value in range(1, times + 1):
                writer.do("fill", value)
                state = writer.do("start", "w", "r", EVEN)
                # Without a progress thread nothing need move until the next check.
                receiver.until(value, 0.15, 0.3)
                calls = {"release": ("release", "w", "r"), "remove_remote_agent": ("ask", "w", how, "r")}
                reply = writer.ask(*calls.get(how, (how, "w")))
                mib, ms = receiver.settle(value, reply.ended, 0.4)
                outcome[f"{state}, {reply.raised or 'no error'}"] += 1
                took.append(reply.ms)
                gap, last = max(gap, reply.gap * 1e3), max(last, ms)
                late.append(mib)
                if not thread and how != "drop":
                    before = receiver.landed(value)
                    writer.do("notified", "w", 0.2)
                    polled.append((receiver.landed(value) - before) * MIB)
                if how == "remove_remote_agent":
                    writer.connect(receiver)
                    writer.do("release", "w", "r")
                if how == "drop":
                    writer.do("make", "w", thread)
                    writer.connect(receiver)
            what = f"3 writer: {called.get(how, how)}, progress thread {'on' if thread else 'off'}"
            held = f"GIL held {gap:.0f} ms at most"
            found = f"{counted(outcome)}; call {spread(took)}, {held}; landed after it: at most {max(late):.1f} MiB"
            more = f"; and when the writer next polled: {max(polled):.1f} MiB" if polled else ""
            row(name, what, times, f"{found}, last change {last:.0f} ms{more}")
            writer.close()
            receiver.close()


def frozen(name: str, env: Env, seconds: float) -> None:
    """Item 5: freeze a side by SIGSTOP, then go on by SIGCONT, and see what a writer can do while the receiver is
    frozen.
    """
    for who in ("receiver", "writer"):
        writer, receiver = Child("w", env), Child("r", env)
        writer.connect(receiver)
        writer.do("fill", 1)
        still = {"receiver": receiver, "writer": writer}[who]
        writer.send("write", "w", "r", EVEN, 120)
        receiver.until(1, 0.2)
        stopped = still.signal(signal.SIGSTOP)
        mib, ms = receiver.settle(1, stopped, 0.5)
        quick, part = writer.pipe.poll(seconds), receiver.landed(1)
        continued = still.signal(signal.SIGCONT)
        out = writer.get().value
        found = "ended while frozen" if quick else f"did not end in {seconds:.0f} s"
        found += f", {part:.0%} landed, last change {ms:.0f} ms after the stop ({mib:.1f} MiB)"
        end = f"{out.state} {max(0.0, (out.ended - continued) * 1e3):.0f} ms after SIGCONT"
        row(name, f"5 {who} frozen", 1, f"{found}; {end}; longest check {out.longest_check * 1e3:.0f} ms")
        writer.close()
        receiver.close()
    closing: dict[str, tuple[Any, ...]] = {"agent destroyed": ("drop", "w"), "transfer()": ("start", "w", "r", EVEN)}
    closing |= {"release": ("release", "w", "r"), "remove_remote_agent": ("ask", "w", "remove_remote_agent", "r")}
    for called, how in closing.items():
        writer, receiver = Child("w", env), Child("r", env)
        writer.connect(receiver)
        writer.do("write", "w", "r", EVEN[:4], 5)
        writer.do("fill", 1)
        receiver.signal(signal.SIGSTOP)
        state = writer.ask("start", "w", "r", EVEN)
        try:
            reply = writer.ask(*how, limit=20)
            found = f"transfer() {state.value} in {state.ms:.0f} ms, then {reply.raised or reply.value or 'ok'} in "
            found += f"{reply.ms:.0f} ms, GIL held {reply.gap * 1e3:.0f} ms"
            if how[0] == "release":
                found += f"; closing the agent then took {writer.ask('drop', 'w', limit=20).ms:.0f} ms"
        except TimeoutError:
            found = "did not return within 20 s"
        before = receiver.landed(1)
        receiver.signal(signal.SIGCONT)
        time.sleep(0.5)
        found += f"; {(receiver.landed(1) - before) * MIB:.1f} MiB land after SIGCONT"
        row(name, f"5 receiver frozen: {called}", 1, found)
        writer.close()
        receiver.close()


def restarted(name: str, env: Env) -> None:
    """Item 6: kill a receiver, and start another with the same agent name, then one with a name of its own."""
    writer, first = Child("w", env), Child("r", env)
    writer.connect(first)
    writer.do("write", "w", "r", EVEN[:4], 5)
    first.signal(signal.SIGKILL)
    second = Child("r", env)
    hello = second.do("hello", "r")
    writer.do("fill", 1)
    steps = [("old list", writer.do("write", "w", "r", EVEN[:4], 5).state)]
    steps.append(("add over it", writer.ask("connect", "w", *hello).raised or "ok"))
    steps.append(("write", writer.do("write", "w", "r", EVEN[:4], 5).state))
    steps.append(("remove", writer.ask("ask", "w", "remove_remote_agent", "r").raised or "ok"))
    steps.append(("old list", writer.do("write", "w", "r", EVEN[:4], 5).state))
    steps.append(("add again", writer.ask("connect", "w", *hello).raised or "ok"))
    steps.append(("write", writer.do("write", "w", "r", EVEN[:4], 5).state))
    landed = bool((second.words[EVEN[:4]] == 1).all())
    row(name, "6 same name", 1, "; ".join(f"{step}: {came}" for step, came in steps) + f"; whole: {landed}")
    again: Counter[str] = Counter()
    for number in range(20):
        for fresh in (False, True):
            epoch = f"r#{number}" if fresh else "r"
            _ = second.do("make", epoch) if fresh else writer.do("ask", "w", "remove_remote_agent", "r")
            reply = writer.ask("connect", "w", *second.do("hello", epoch))
            state = reply.raised or writer.do("write", "w", epoch, EVEN[:32], 5).state
            again[f"{'a name of its own' if fresh else 'removed, added at once'}: {state}"] += 1
            if fresh:
                second.do("drop", epoch)
    row(name, "6 epochs", 40, counted(again))
    for child in (writer, first, second):
        child.close()


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"| transport | case ({MIB} MiB writes) | trials | found |\n|---|---|---|---|")
    for name, env in TRANSPORTS.items():
        restarted(name, env)
        frozen(name, env, 10)
        writer_aborts(name, env, max(1, trials // 10))
        writer_killed_unread(name, env, max(1, trials // 10))
        receiver_killed(name, env, trials)
        writer_killed(name, env, max(1, trials // 2))


if __name__ == "__main__":
    main()
