"""Plays one attacker against one cluster, and judges what became of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.machine import limit

from pdserve.runtime.web.moved_answer import MOVED_PATH

from . import client, local, peer
from .cluster import MALLORY, Cluster, cluster
from .members import MembersWatch, wait_ready
from .neighbour import Neighbour
from .sound import USER_PATHS
from .watch import Record, Vitals

Attack = Callable[[Cluster, Neighbour, Record, int, threading.Event], list[threading.Thread]]
ATTACKERS: dict[str, Attack] = {"client": client.attack, "local": local.attack, "peer": peer.attack}
WARM_UP_SECONDS = 10.0
"""Seconds of attack before the processes are measured: what the first attack of a kind loads is no growth."""
LOOK_SECONDS = 1.0
MOST_PROBLEMS = 5
TRACE = re.compile(r"Traceback \(most recent call last\)|Exception in ASGI|exception was never retrieved")


@dataclass
class Report:
    """What a campaign found; ``problems`` is empty when nothing was violated."""

    record: Record
    neighbour: Neighbour
    seconds: float = 0.0
    memory: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sent, kinds = sum(self.record.kinds.values()), dict(self.record.kinds.most_common())
        asked = dict(self.neighbour.statuses)
        return "\n".join(
            [
                f"{sent} attacks in {self.seconds:.0f} s: {kinds}",
                f"statuses: {dict(sorted(self.record.statuses.items()))}",
                f"the neighbour's answers: {asked}, the slowest after {self.neighbour.slowest:.1f} s",
                *([self.record.path_table(), unserved(self.record)] if self.record.paths else []),
                self.memory,
                *(f"VIOLATED: {problem:.6000}" for problem in self.problems[:MOST_PROBLEMS]),
            ]
        )


def unserved(record: Record) -> str:
    """Return a line with the paths that a user key may use and that served nothing: they are hardly attacked."""
    served = {path for path, statuses in record.paths.items() if any(status < 400 for status in statuses)}
    # Only another instance has a ticket for the rest of an answer.
    wanted = [f"{method} {one.label}" for one in USER_PATHS if one.label != MOVED_PATH for method in one.methods]
    return f"paths that served nothing: {', '.join(path for path in wanted if path not in served) or 'none'}"


def campaign(who: str, folder: Path, backend: str, seed: int, seconds: float) -> Report:
    """Play an attacker for ``seconds`` against a cluster in ``folder``."""
    with cluster(folder, backend) as target:
        return attacked(ATTACKERS[who], target, seed, seconds)


def attacked(attack: Attack, target: Cluster, seed: int, seconds: float) -> Report:
    """Attack a running cluster for ``seconds``."""
    wait_ready(target)
    members = MembersWatch(target)
    neighbour, record = Neighbour(target, seed), Record()
    record.secrets += neighbour.secrets
    neighbour.foreign.append(target.keys[MALLORY].encode())
    report = Report(record, neighbour)
    stop = threading.Event()
    neighbour.start()
    threads = attack(target, neighbour, record, seed, stop)
    began = time.monotonic()
    vitals = Vitals(target)
    warm = False
    while time.monotonic() < began + seconds and len(report.problems) < MOST_PROBLEMS:
        time.sleep(LOOK_SECONDS)
        if not warm and time.monotonic() > began + WARM_UP_SECONDS:
            warm, vitals = True, Vitals(target)
        report.problems = [*vitals.check(), *record.violations, *neighbour.problems]
        if dead := [thread.name for thread in threads if not thread.is_alive()]:
            report.problems.append(f"the attacker's own code failed: {dead}")
            break
    stop.set()
    report.seconds = time.monotonic() - began
    for thread in threads:
        thread.join(limit(60))
    neighbour.stop()
    report.problems = [*dict.fromkeys([*report.problems, *record.violations, *neighbour.problems])]
    report.problems += aftermath(target, neighbour, vitals, members)
    report.memory = vitals.table()
    return report


def aftermath(target: Cluster, neighbour: Neighbour, vitals: Vitals, members: MembersWatch) -> list[str]:
    """Return what is wrong with the cluster once the attacker has gone."""
    problems: list[str] = []
    before = len(neighbour.problems)
    checks: list[Callable[[], None]] = [
        neighbour.ask_all,
        neighbour.responses.delete,
        lambda: client.clean_up(target),
        lambda: problems.extend(members.check(neighbour.questions[0])),
        lambda: target.wait_given_back(60),
    ]
    for check in checks:
        try:
            check()
        except Exception as e:  # noqa: BLE001
            # Whatever keeps a cluster from being asked is a finding, and the other checks are made all the same.
            problems.append(f"after the attack: {e!r}")
    problems += neighbour.problems[before:]
    problems += sessions_left(target)
    problems += vitals.check_left(limit(30))
    log = target.log()
    problems += [f"the log: {log[max(0, m.start() - 300) : m.start() + 2500]}" for m in TRACE.finditer(log)][:3]
    return problems


def sessions_left(target: Cluster) -> list[str]:
    """Return the sessions that have not been deleted."""
    answer: Any = target.admin.get(target.url + "/kv/sessions").json()
    left = answer.get("sessions", [])
    return [f"sessions are left: {left}"] if left else []
