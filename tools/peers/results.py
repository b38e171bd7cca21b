"""Reads the files that a comparison left, and takes medians and ratios of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .cases import Case, Metric
from .errors import ResultsError
from .machine import Machine

CLIENT_COST = "client-cost.txt"
MACHINE = "machine.json"
_NAME = re.compile(r"(?P<case>[^.]+)\.(?P<engine>[^.]+)\.(?P<number>\d+)\.json")


@dataclass(frozen=True)
class Results:
    """``runs``: by case, engine and round, what ``pdserve bench serve`` wrote; ``client_cost``: lines of text.

    ``machine``: where all of it was measured.
    """

    runs: Mapping[tuple[str, str, int], Mapping[str, Any]]
    machine: Machine
    client_cost: str = ""

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read all results in ``folder``. Raises ``ResultsError`` if it doesn't record the machine."""
        try:
            machine = Machine(**orjson.loads((folder / MACHINE).read_bytes()))
        except (OSError, ValueError, TypeError) as e:
            raise ResultsError(f"{folder} holds no results of a comparison ({MACHINE}: {e})") from None
        runs = {}
        for path in sorted(folder.glob("*.json")):
            if found := _NAME.fullmatch(path.name):
                (run,) = orjson.loads(path.read_bytes())["runs"]
                runs[found["case"], found["engine"], int(found["number"])] = run
        cost = folder / CLIENT_COST
        return cls(runs, machine, cost.read_text(encoding="utf-8").rstrip() if cost.exists() else "not measured")

    def rounds(self, case: str, engine: str) -> dict[int, Mapping[str, Any]]:
        """Return the runs of a case on an engine, by round."""
        return {number: run for (c, e, number), run in self.runs.items() if (c, e) == (case, engine)}

    def values(self, case: Case, engine: str, metric: Metric) -> dict[int, float]:
        """Return the values of a metric of ``case`` on ``engine`` by round; rounds without it are left out."""
        read = {number: metric.read(run["report"]) for number, run in self.rounds(case.name, engine).items()}
        return {number: value for number, value in read.items() if value is not None}

    def median(self, case: Case, engine: str, metric: Metric) -> float | None:
        """Return a metric's median over the rounds; None if no round has the metric."""
        values = self.values(case, engine, metric)
        return statistics.median(values.values()) if values else None

    def ratio(self, case: Case, ours: str, theirs: str, metric: Metric) -> float | None:
        """Return how many times better ``ours`` is than ``theirs``: the median of the ratios within each round.

        Only rounds that have both count. None if there are none.
        """
        a, b = self.values(case, ours, metric), self.values(case, theirs, metric)
        ratios = [metric.ratio(a[number], b[number]) for number in a.keys() & b.keys() if a[number] and b[number]]
        return statistics.median(ratios) if ratios else None

    def typical_round(self, case: Case, engine: str) -> Mapping[str, Any] | None:
        """Return the run to plot: the one with the case's first metric nearest to its median. None without any run."""
        values = self.values(case, engine, case.metrics[0])
        if not values:
            return None
        middle = statistics.median(values.values())
        number = min(values, key=lambda n: (abs(values[n] - middle), n))
        return self.rounds(case.name, engine)[number]


def claim(folder: Path, machine: Machine) -> None:
    """Create ``folder`` for results if it is missing, and record ``machine`` in it.

    Raises ``ResultsError`` if it records another machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MACHINE
    if not path.exists():
        path.write_bytes(orjson.dumps(machine, option=orjson.OPT_INDENT_2))
    if (other := Results.read(folder).machine) != machine:
        raise ResultsError(f"{folder} holds results of {other.line}; this is {machine.line}: give another --results")
