"""Measures every case on every engine, round by round: engine A, B, C, then A, B, C again.

A machine's speed drifts within hours. Rounds put the engines that a ratio compares next to each other in time. The
ratio is taken within each round, and then the median over rounds.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from pdserve.runtime.python import python_command

from ..environment import environment
from .cases import CASES, Case
from .engines import ENGINES, Engine
from .errors import CaseFailed, PeerError
from .layout import PeerSetup
from .machine import IDLE_PATIENCE, wait_idle
from .processes import running
from .results import CLIENT_COST

CASE_TIMEOUT_SECONDS = 900.0
Say = Callable[[str], None]


class Comparison:
    """Runs what is missing in ``results``; a file there is one run (see ``result_path``).

    ``patience``: seconds to wait for an idle machine before each engine.
    """

    def __init__(self, setup: PeerSetup, results: Path, say: Say, patience: float = IDLE_PATIENCE) -> None:
        self._setup = setup
        self._results = results
        self._say = say
        self._patience = patience

    def run(self, rounds: int, engines: Iterable[str], cases: Iterable[str]) -> list[str]:
        """Measure each case on each engine in each round. Return a description of each failure.

        An engine that fails is left out of its round, and the rest goes on.
        """
        wanted = [CASES[name] for name in cases]
        failures = []
        for number in range(rounds):
            for engine in map(ENGINES.__getitem__, engines):
                try:
                    failures += self._run_engine(number, engine, wanted)
                except PeerError as e:
                    failures.append(f"round {number + 1}, {engine.name}: {e}")
                    self._say(failures[-1])
        return failures

    def measure_client(self) -> None:
        """Measure the load generator's own CPU time on this machine and save it with the results.

        No server may be running. Raises ``CaseFailed``.
        """
        argv = python_command("-m", "tools.client_cost")
        ran = subprocess.run(
            argv, capture_output=True, text=True, timeout=CASE_TIMEOUT_SECONDS, check=False, env=environment()
        )
        if ran.returncode:
            raise CaseFailed(f"{' '.join(argv)} ended with {ran.returncode}:\n{ran.stderr}")
        (self._results / CLIENT_COST).write_text(ran.stdout, encoding="utf-8")

    def _run_engine(self, number: int, engine: Engine, wanted: list[Case]) -> list[str]:
        missing = [
            case
            for case in wanted
            if case.name in engine.cases and not result_path(self._results, number, engine.name, case.name).exists()
        ]
        if not missing:
            return []
        quiet = "" if wait_idle(self._patience) else ", on a busy machine"
        self._say(f"round {number + 1}: {engine.title}{quiet}")
        failures = []
        with running(engine, self._setup, self._results / "logs") as url:
            for case in missing:
                try:
                    self._run_case(number, engine, case, url)
                except CaseFailed as e:
                    failures.append(f"round {number + 1}, {engine.name}, {case.name}: {e}")
                    self._say(failures[-1])
        return failures

    def _run_case(self, number: int, engine: Engine, case: Case, url: str) -> None:
        path = result_path(self._results, number, engine.name, case.name)
        # Renamed when complete: what is there under its name can be relied on.
        unfinished = path.with_suffix(".part")
        argv = bench_command(engine, case, number, url, unfinished)
        try:
            ran = subprocess.run(argv, capture_output=True, text=True, timeout=CASE_TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise CaseFailed(f"not done after {CASE_TIMEOUT_SECONDS:g} s") from None
        if ran.returncode:
            raise CaseFailed(f"{' '.join(argv)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        unfinished.rename(path)
        self._say(f"  {case.name}")


def bench_command(engine: Engine, case: Case, number: int, url: str, output: Path) -> list[str]:
    """Return the load generator's command line for one run. ``number``: the round.

    Every case of every round has prompts of its own, equal for all engines. Prompts that an engine has seen before
    would come from its prefix cache.
    """
    seed = number * len(CASES) + list(CASES).index(case.name)
    served = ("--backend", engine.backend, "--base-url", url, "--seed", str(seed))
    kept = ("--output-json", str(output), "--output-details", *(() if case.may_leave_undone else ("--strict",)))
    return python_command("-m", "pdserve.server.cli", "bench", "serve", *served, *case.args, *kept)


def result_path(results: Path, number: int, engine: str, case: str) -> Path:
    """Return the path of the result file of one run. ``number``: the round."""
    return results / f"{case}.{engine}.{number}.json"
