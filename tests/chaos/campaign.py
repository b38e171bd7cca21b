"""One backend's campaign: episode after episode on one cluster, each with load, a fault, and a look at what is left."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import httpx
from support.machine import stretched
from support.processes import wait_until

from .cluster import Cluster, running
from .expected import Question, model_args, questions
from .faults import LINKS, Fault, Kind, drawn
from .hosts import run
from .judge import Episode, Verdict, judge
from .load import Load
from .strikes import strike

RECOVERY_SECONDS = 15.0
IDLE_SECONDS = 15.0
AFTERMATH_SECONDS = 0.5
TRACE = "Traceback (most recent call last)"


class Logs:
    """What the servers have written since the last look."""

    def __init__(self, cluster: Cluster) -> None:
        self._paths = {name: server.log_path for name, server in cluster.servers.items()}
        self._seen = dict.fromkeys(self._paths, 0)
        self.fresh_lines()

    def fresh_lines(self) -> dict[str, str]:
        """Return what each instance has logged since the last call."""
        found = {}
        for name, path in self._paths.items():
            text = path.read_text(errors="replace")
            found[name], self._seen[name] = text[self._seen[name] :], len(text)
        return found


def play(cluster: Cluster, fault: Fault, asked: list[Question], seed: int) -> Verdict:
    """Play one episode: the cluster is whole and idle before and after."""
    before = cluster.recomputed()
    load = Load(cluster.url, asked, seed)
    problems: list[str] = []
    struck = back = serving = time.monotonic()
    try:
        time.sleep(fault.lead)
        struck = time.monotonic()
        strike(cluster, fault, asked)
        since, back = handovers_now(cluster)
        wait_until(lambda: cluster.all_moved_on(since), RECOVERY_SECONDS, "every instance serves again", every=0.2)
        serving = time.monotonic()
        time.sleep(AFTERMATH_SECONDS)
    except AssertionError as e:
        problems.append(str(e))
        back = serving = time.monotonic()
    answers = load.finish()
    verdict = judge(Episode(fault, struck, back, serving), answers)
    try:
        wait_until(lambda: not cluster.in_use(), IDLE_SECONDS, "nothing is in use", every=0.2)
        after = cluster.recomputed()
        verdict.recomputed = sum(
            int(count - (before[name][1] if before[name][0] == epoch else 0)) for name, (epoch, count) in after.items()
        )
    except (AssertionError, httpx.HTTPError) as e:
        problems.append(f"{e}: {left(cluster)}")
        verdict.leaked += 1
    verdict.notes += problems
    return verdict


def handovers_now(cluster: Cluster) -> tuple[dict[str, tuple[str, int]], float]:
    """Return the hand-overs so far and the time, from which the recovery is counted.

    A router that was frozen a moment ago may need another try.
    """
    back = time.monotonic()
    while True:
        try:
            return cluster.handed_over(), back
        except httpx.HTTPError:
            assert time.monotonic() < back + stretched(RECOVERY_SECONDS), "the router does not answer"


def left(cluster: Cluster) -> str:
    """Return what is in use, as far as the instances answer."""
    try:
        return str(cluster.in_use())
    except (AssertionError, httpx.HTTPError) as e:
        return repr(e)


def traces(logged: dict[str, str]) -> list[str]:
    """Return errors that a server did not expect: the last lines of each."""
    found = []
    for name, text in logged.items():
        found += [f"{name}: {TRACE}{rest[:2500]}" for rest in text.split(TRACE)[1:]]
    return found


def left_out(backend: str, inside: bool) -> frozenset[Kind]:
    """Return the faults that can't be caused with this backend here."""
    if not inside:
        return LINKS
    return LINKS - {Kind.RESET} if backend == "shm" else frozenset()


def campaign(backend: str, count: int, seed: int, inside: bool, tmp: Path, result: Path) -> None:
    """Run the whole campaign. ``result`` gets a line of JSON for each fault."""
    args = model_args(tmp)
    if inside:
        run("ip", "link", "set", "lo", "up")
    asked = questions(tmp, args)
    with running(tmp, backend, args, inside) as cluster, result.open("a") as lines:
        logs = Logs(cluster)
        for number, fault in enumerate(drawn(seed, count, left_out(backend, inside))):
            began = time.monotonic()
            verdict = play(cluster, fault, asked, seed + number)
            verdict.notes += traces(logs.fresh_lines())
            print(json.dumps(asdict(verdict)), file=lines, flush=True)
            print(line(backend, number, verdict, time.monotonic() - began), flush=True)
            for note in verdict.notes:
                print(f"    {note}", flush=True)
            if not verdict.good and (verdict.leaked or verdict.notes):
                cluster.end()  # what comes next shall not suffer from it
                cluster.start()


def line(backend: str, number: int, verdict: Verdict, seconds: float) -> str:
    """Return the line that is printed for a fault."""
    bad = f", wrong {verdict.wrong}, late {verdict.late}, leaked {verdict.leaked}" if not verdict.good else ""
    return (
        f"{backend} {number + 1:3}: {verdict.fault}: {verdict.requests} requests, {verdict.finished} finished, "
        f"{verdict.aborted} aborted, errors {verdict.errors}, recomputed {verdict.recomputed}, "
        f"serving after {verdict.recovery:.1f} s ({seconds:.0f} s in all){bad}"
    )


if __name__ == "__main__":
    backend, count, seed, inside, result = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix=f"pdserve-chaos-{backend}-"))
    print(f"{backend}: logs in {folder}", flush=True)
    campaign(backend, int(count), int(seed), inside == "inside", folder, Path(result))
